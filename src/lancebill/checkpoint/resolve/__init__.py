"""Resolve headers: which tensors make up each expert, in which format, and what is missing or wrong."""
