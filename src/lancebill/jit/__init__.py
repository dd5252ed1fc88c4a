"""Source to compiled kernel to launch. Knows nothing of experts or weights."""
