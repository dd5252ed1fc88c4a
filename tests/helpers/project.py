"""Where the project's own files are, for tests that read them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = Path(__file__).parent
