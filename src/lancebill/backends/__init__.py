"""Ways to compute: one module or folder each, found by the registry and weighed by the oracle."""
