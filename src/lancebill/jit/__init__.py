"""Compiles kernels, caches them and launches them. Independent of experts and weights."""
