"""The choice of configurations: a small policy, and measured data."""
