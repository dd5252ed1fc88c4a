"""Writing checkpoints: a target format, conversion, safetensors files published whole."""
