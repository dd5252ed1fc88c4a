"""Bytes on disk: safetensors and GGUF headers, configs, slices of tensors. Nothing here knows of experts."""
