"""The parameters of every request: each one is read by a rule of its table, or refused with the reason.

A parameter that is null counts as absent. One that no table lists is refused too: nothing is ignored silently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_CHOICES, MOST_STOPS, MOST_LOGPROBS, MOST_BIASES, MOST_PROMPTS = 8, 16, 20, 1024, 64

Read = Callable[[Any], Any]  # returns the value, or raises ValueError with what is expected


class ApiError(Exception):
    """An error in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        # A message may quote what a client sent, and half a character cannot be sent back.
        message, param = _sendable(message), None if param is None else _sendable(param)
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def _sendable(said: str) -> str:
    return said.encode(errors="backslashreplace").decode()


def integer(low: int, high: int = 2**31 - 1) -> Read:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return read


def number(low: float, high: float) -> Read:
    def read(value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"a number from {low} to {high}")
        return float(value)

    return read


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("a string of whole Unicode characters") from None
    return value


def stops(value: Any) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MOST_STOPS or not all(isinstance(stop, str) and stop for stop in listed):
        raise ValueError(f"a string or up to {MOST_STOPS} strings, none of them empty")
    return tuple(map(text, listed))


def logit_bias(value: Any) -> dict[int, float]:
    wrong = ValueError(f"an object of up to {MOST_BIASES} token ids with numbers from -100 to 100")
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise wrong
    biases = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10) or isinstance(bias, bool):
            raise wrong
        if not isinstance(bias, (int, float)) or not abs(bias) <= 100:  # also NaN
            raise wrong
        biases[int(token)] = float(bias)
    return biases


def labels(value: Any) -> dict[str, str]:
    """`metadata`: given back as it came."""
    if not isinstance(value, dict) or len(value) > 16 or not all(isinstance(each, str) for each in value.values()):
        raise ValueError("an object of up to 16 strings")
    return {text(name): text(each) for name, each in value.items()}


def template_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an object of variables for the chat template")
    return value


def only(*allowed: Any, instead: str = "") -> Read:
    """Accept only values that match this server's fixed behaviour."""

    def read(value: Any) -> Any:
        if value not in allowed or isinstance(value, bool) is not isinstance(allowed[0], bool):
            shown = " or ".join(map(json.dumps, allowed))
            raise ValueError(f"{shown}; this server does not support anything else{instead}")
        return value

    return read


def refused(value: Any) -> Any:
    raise ValueError("nothing here: this server does not support it")


def stream_options(value: Any) -> bool:
    """Whether a last event reports the usage."""
    if not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise ValueError('an object with "include_usage"')
    return boolean(value.get("include_usage", False))


def messages(value: Any) -> list[dict[str, str]]:
    return _messages(value, ("role", "content", "type"))


def response_input(value: Any) -> list[dict[str, str]]:
    """Text, or messages; those of a reply have an id and a status, and may be sent back with them."""
    if isinstance(value, str):
        return [{"role": "user", "content": text(value)}]
    return _messages(value, ("role", "content", "type", "id", "status"))


def _messages(value: Any, keys: Sequence[str]) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of at least one message")
    return [_message(each, f"message {index}", keys) for index, each in enumerate(value)]


def _message(value: Any, where: str, keys: Sequence[str]) -> dict[str, str]:
    said = _object(value, where, keys)
    role = said.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise ValueError(f"the role system, developer, user or assistant in {where}")
    if said.get("type", "message") != "message":
        raise ValueError(f'the type "message" in {where}')
    for name in ("id", "status"):
        text(said.get(name, ""))
    # Templates do not know "developer", which is OpenAI's newer name of "system".
    return {"role": "system" if role == "developer" else role, "content": _content(said.get("content"), where)}


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return text(value)
    wrong = ValueError(f"text as the content of {where}: a string, or a list of parts of type text")
    if not isinstance(value, list):
        raise wrong
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
            raise wrong
        parts.append(text(_object(part, f"the content of {where}", ("type", "text")).get("text")))
    return "".join(parts)


def _object(value: Any, where: str, keys: Sequence[str]) -> dict[str, Any]:
    """The object without nulls and empty lists, which clients echo from our replies."""
    if not isinstance(value, dict):
        raise ValueError(f"an object as {where}")
    said = {name: each for name, each in value.items() if each is not None and each != []}
    for name in said:
        if name not in keys:
            raise ValueError(f"nothing but {', '.join(keys)} in {where}, which has {name[:64]!r}")
    return said


def prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several; a prompt is text or token ids."""
    one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    listed = [value] if one else value
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_PROMPTS:
        raise ValueError(f"a prompt or a list of up to {MOST_PROMPTS}; a prompt is a string or a list of token ids")
    return [text(each) if isinstance(each, str) else _token_ids(each) for each in listed]


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError("strings, or lists of token ids")
    return value


def tool_list(value: Any) -> Any:
    if value != []:
        raise ValueError("no tools: this server does not support them")
    return value


SAMPLED = {
    "model": text,
    "temperature": number(0, 2),
    "top_p": number(1e-6, 1),
    "stream": boolean,
    "user": text,
    "safety_identifier": text,
    "prompt_cache_key": text,
    "service_tier": only("auto", "default"),
}
MORE_SAMPLED = {
    "top_k": integer(0),
    "min_p": number(0, 1),
    "seed": integer(-(2**63), 2**63 - 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(1e-6, 1e6),
    "logit_bias": logit_bias,
    "n": integer(1, MOST_CHOICES),
    "stop": stops,
    "max_tokens": integer(1),
    "stream_options": stream_options,
}
NO_TOOLS = {"tools": tool_list, "tool_choice": only("none", "auto"), "parallel_tool_calls": boolean}
CHAT: Mapping[str, Read] = {
    **SAMPLED,
    **MORE_SAMPLED,
    **NO_TOOLS,
    "messages": messages,
    "max_completion_tokens": integer(1),
    "logprobs": boolean,
    "top_logprobs": integer(0, MOST_LOGPROBS),
    "response_format": only({"type": "text"}),
    "modalities": only(["text"]),
    "store": only(False),
    "reasoning_effort": text,
    "chat_template_kwargs": template_variables,
    **dict.fromkeys(("functions", "function_call", "audio", "prediction", "verbosity", "web_search_options"), refused),
    "metadata": refused,
}
COMPLETION: Mapping[str, Read] = {
    **SAMPLED,
    **MORE_SAMPLED,
    "prompt": prompts,
    "logprobs": integer(0, MOST_LOGPROBS),
    "echo": only(False),
    "best_of": only(1, instead="; n gives several answers"),
    "suffix": refused,
}
RESPONSE: Mapping[str, Read] = {
    **SAMPLED,
    **NO_TOOLS,
    "input": response_input,
    "instructions": text,
    "metadata": labels,
    "max_output_tokens": integer(1),
    "text": only({"format": {"type": "text"}}, {}),
    "store": only(False),
    "background": only(False),
    "truncation": only("disabled"),
    "include": only([]),
    "top_logprobs": only(0),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "reasoning", "max_tool_calls"), refused),
    "stream_options": refused,
}


def read_parameters(table: Mapping[str, Read], body: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """The values of a request; raises for the first one that is wrong, unknown or missing."""
    values = {}
    for name, value in body.items():
        if value is None:
            continue
        if name not in table:
            raise ApiError(400, f"unknown parameter: {name[:64]!r}", name[:64], "unknown_parameter")
        try:
            values[name] = table[name](value)
        except ValueError as error:
            code = "unsupported_parameter" if table[name] is refused else "invalid_value"
            raise ApiError(400, f"{name}: expected {error}", name, code) from None
    for name in required:
        if name not in values:
            raise ApiError(400, f"missing parameter: {name!r}", name, "missing_required_parameter")
    return values
