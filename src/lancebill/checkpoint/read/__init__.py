"""Files on disk: safetensors and GGUF headers, configs, slices of tensors. Nothing here depends on experts."""
