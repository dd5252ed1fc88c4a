"""Tests against the library compressed-tensors, which has no release for Python 3.10, run where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

AGAINST_THE_LIBRARY = [
    "test_compressed_tensors.py", "test_compressed_tensors_config.py", "test_ct_transforms.py", "test_modelopt.py",
]  # fmt: skip
collect_ignore = [] if find_spec("compressed_tensors") else AGAINST_THE_LIBRARY
