"""Measures lancebill beside other implementations: `python -m benchmarks --list`, and docs/benchmarks.md."""
