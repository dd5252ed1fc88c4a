"""Write checkpoints: choose a target format, convert to it, write safetensors files atomically."""
