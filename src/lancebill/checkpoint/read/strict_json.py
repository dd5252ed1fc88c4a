"""Parse JSON from untrusted files.

Python's parser accepts duplicate keys (the last wins), NaN, numbers of any length and lone surrogates. Two programs may
then read different values from one file, or fail far from the cause. Here each of them is an error.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from lancebill.checkpoint.read.file_bytes import opened
from lancebill.checkpoint.read.links import check_link
from lancebill.checkpoint.read.tensor_info import quoted
from lancebill.errors import MalformedFile

MAX_BYTES = 100_000_000
MAX_DIGITS = 40


class _Refused(ValueError):
    """Accepted by Python's parser, refused here."""


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON document whose top level is an object."""
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
        if "\\u" in text:  # only an escape can produce a lone surrogate
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise MalformedFile("the JSON is nested too deeply", where=where) from None
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        raise MalformedFile(what, where=where) from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise MalformedFile(f"not valid UTF-8 text: {error.reason}", where=where) from None
    except ValueError as error:
        raise MalformedFile(f"not usable JSON: {error}", where=where) from None
    if not isinstance(value, dict):
        raise MalformedFile("the JSON is not an object", where=where, expected="{...}", got=type(value).__name__)
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint."""
    check_link(path, path.parent)
    with opened(path) as (file, size):
        if size > MAX_BYTES:
            raise MalformedFile("the JSON file is too large", where=str(path), expected=f"<= {MAX_BYTES}", got=size)
        data = file.read(size)
    return parse_object(data, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {quoted(twice)} occurs twice")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Refused(f"a number of {len(digits)} digits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Refused(f"the number {quoted(digits, 40)} is not finite")
    return value


def _constant(name: str) -> NoReturn:
    raise _Refused(f"the literal {name}")
