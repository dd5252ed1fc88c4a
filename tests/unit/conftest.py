"""Every run of the suite tries the same cases; `--hypothesis-profile=default` searches for new ones."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same-cases", derandomize=True, deadline=None)
settings.load_profile("same-cases")
