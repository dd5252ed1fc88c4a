"""Options that several commands have in common, as one value: a frozen class with a field for each option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter
from typing import Any, get_type_hints


def with_options(group: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `group`; it gets their values as its parameter `options`.

    typer reads the options of a command from its signature, so that of the decorated command lists them in the place
    of `options`.
    """
    hints = get_type_hints(group, include_extras=True)
    listed = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters = list[Parameter]()
        for parameter in signature.parameters.values():
            parameters += listed if parameter.name == "options" else [parameter]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            command(options=group(**{field.name: given.pop(field.name) for field in listed}), **given)

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate
