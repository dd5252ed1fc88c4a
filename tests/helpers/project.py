"""Paths of the project, for tests that read its files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = Path(__file__).parent
