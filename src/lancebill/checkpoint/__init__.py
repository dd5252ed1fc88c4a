"""Checkpoints: files, names, manifests, placement, streaming load and save."""
