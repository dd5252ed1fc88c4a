"""Which variables a chat template reads."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

# What the server says itself, or transformers' function takes as an argument of its own, or offers to every template.
NOT_GIVEN = {"messages", "tools", "conversation", "chat_template", "add_generation_prompt", "continue_final_message"}
NOT_GIVEN |= {"tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
NOT_GIVEN |= {"return_assistant_tokens_mask", "sanitize_control_tokens", "raise_exception", "strftime_now"}


class _Generation(Extension):
    """transformers' block around what an assistant said."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(8)
def variables(template: str) -> frozenset[str]:
    """Those that a request may give; none of a template that is not one. Nothing of it is run."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    try:
        read = meta.find_undeclared_variables(environment.parse(template))
    except (jinja2.TemplateError, RecursionError):
        return frozenset()
    return frozenset(read) - environment.globals.keys() - NOT_GIVEN


def source(tokenizer: Any) -> str:
    """The template that transformers takes of a tokenizer's."""
    return str(tokenizer.get_chat_template())
