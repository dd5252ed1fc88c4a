"""A dict for what can be made again: when it is full, everything in it is dropped.

A server sees batches of every size and allocators return many addresses, so what is kept by them must not grow without
end. Dropping everything costs one slow call for each key that is used again; reading costs what it costs a dict.
"""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LimitedDict(dict[Key, Value]):
    """Holds at most `most` keys."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
