"""Checkpoints: read files, resolve names and formats, load experts, write converted checkpoints.

The packages import one way: write imports load, load imports resolve, resolve imports read.
"""
