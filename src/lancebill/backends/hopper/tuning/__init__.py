"""Which configuration runs: a small policy, and measured numbers as data."""
