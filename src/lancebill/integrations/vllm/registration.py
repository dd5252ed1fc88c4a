"""Registration as a whole: what it changes in vLLM, and how that is undone where a step of it fails."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from lancebill.integrations.vllm.hooks import PATCH_HOOKS, RELOAD_HOOKS, SAVE_HOOKS, Hook

NOT_THERE = object()
COLLECTIVES = ("all_gather", "reduce_scatter")


@contextmanager
def all_or_nothing(containers: Sequence[Any], attributes: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """If it fails inside, the containers hold what they held before, and the attributes are what they were.

    `attributes` are pairs of a class or module and a name, which may be missing.
    """
    held = [(container, copy.copy(container)) for container in containers]
    values = [(owner, name, vars(owner).get(name, NOT_THERE)) for owner, name in attributes]
    try:
        yield
    except BaseException:
        for container, before in held:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        for owner, name, value in values:
            if value is not NOT_THERE:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        raise


def changed_containers() -> list[Any]:
    """vLLM's tables in which registration adds or replaces entries."""
    from vllm import ModelRegistry
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.platforms import current_platform

    return [ModelRegistry.models, op_registry_oot, QUANTIZATION_METHODS, current_platform.supported_quantization]


def changed_attributes() -> list[tuple[Any, str]]:
    """vLLM's functions that registration replaces."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.engine.arg_utils import EngineArgs

    always = [(EngineArgs, "create_engine_config"), *((CpuCommunicator, f"{name}v") for name in COLLECTIVES)]
    return [*always, *map(place_of, (*RELOAD_HOOKS[:1], *PATCH_HOOKS, *SAVE_HOOKS))]


def place_of(hook: Hook) -> tuple[Any, str]:
    """The class or module that has a hook, and its name there. A placeholder if the hook does not exist."""
    owner, _, name = hook.name.rpartition(".")
    try:
        module = importlib.import_module(hook.module)
        return (attrgetter(owner)(module) if owner else module), name
    except (ImportError, AttributeError):
        return SimpleNamespace(), name
