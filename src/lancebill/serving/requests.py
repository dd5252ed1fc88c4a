"""From the parameters of a request to the answers it asks for: prompts in tokens, sampling, limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from lancebill.serving import templates
from lancebill.serving.parameters import ApiError
from lancebill.serving.sampling import Sampling

COMPLETION_TOKENS = 16  # default max_tokens of /v1/completions, as in OpenAI's API
# A template may do anything with the values of a client: index, divide, recurse.
TEMPLATE_FAILED = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
MOST_QUOTED = 500  # characters of another program's error


@dataclass(frozen=True)
class Served:
    """The model as clients see it."""

    name: str
    tokenizer: Any
    context: int  # tokens of a prompt and its answer
    vocabulary: int  # token ids that the model embeds
    defaults: Sampling  # for parameters that a request leaves out


@dataclass(frozen=True)
class Wanted:
    """The answers of one request: for each prompt, `choices` of at most `most` tokens."""

    prompts: tuple[tuple[int, ...], ...]
    choices: int
    most: tuple[int, ...]  # for each prompt
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    usage_event: bool
    stop_tokens: frozenset[int] = frozenset()  # special tokens among the stops: texts do not have them

    @property
    def answers(self) -> list[tuple[tuple[int, ...], int, Sampling]]:
        """Prompt, most tokens and sampling of each; the choices of one prompt have different random numbers."""
        seeds = range(self.choices)
        return [
            (prompt, most, self._seeded(choice)) for prompt, most in zip(self.prompts, self.most) for choice in seeds
        ]

    def _seeded(self, choice: int) -> Sampling:
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=(seed + choice) % 2**63)


def wanted(served: Served, values: Mapping[str, Any]) -> Wanted:
    """Convert the validated values of a request (any of the three kinds)."""
    if "model" in values and values["model"] != served.name:
        raise ApiError(
            404, f"the model {values['model'][:128]!r} does not exist; this server has {served.name!r}", "model",
            "model_not_found",
        )  # fmt: skip
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise ApiError(400, "top_logprobs: expected logprobs to be true", "top_logprobs", "invalid_value")
    if "stream_options" in values and not values.get("stream"):
        raise ApiError(400, "stream_options: expected stream to be true", "stream_options", "invalid_value")
    if "max_tokens" in values and values["max_tokens"] != values.get("max_completion_tokens", values["max_tokens"]):
        raise ApiError(400, "max_tokens: expected max_completion_tokens alone", "max_tokens", "invalid_value")
    name, prompts = _prompts(served, values)
    return Wanted(
        prompts=prompts,
        choices=values.get("n", 1),
        most=tuple(_most(served, values, name, len(prompt)) for prompt in prompts),
        sampling=_sampling(served, values),
        stops=values.get("stop", ()),
        stream=values.get("stream", False),
        usage_event=values.get("stream_options", False),
        stop_tokens=_special_tokens(served, values.get("stop", ())),
    )


def _special_tokens(served: Served, texts: Sequence[str]) -> frozenset[int]:
    """Ids of special tokens with exactly one of these texts."""
    added = served.tokenizer.added_tokens_decoder if texts else {}
    return frozenset(token for token, one in added.items() if one.special and one.content in texts)


def _sampling(served: Served, values: Mapping[str, Any]) -> Sampling:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    given = {name: values[name] for name in (*names, *penalties) if name in values}
    if any(token >= served.vocabulary for token in given.get("logit_bias", ())):
        raise ApiError(400, f"logit_bias: expected token ids below {served.vocabulary}", "logit_bias", "invalid_value")
    asked = values.get("logprobs")
    if isinstance(asked, bool):
        asked = values.get("top_logprobs", 0) if asked else None
    return replace(served.defaults, **given, top_logprobs=asked)


def _most(served: Served, values: Mapping[str, Any], name: str, prompt: int) -> int:
    """Tokens of an answer: what is asked for; by default all that fit, in a completion a few."""
    asked = [values[each] for each in ("max_completion_tokens", "max_output_tokens", "max_tokens") if each in values]
    left = served.context - prompt
    most = asked[0] if asked else min(left, COMPLETION_TOKENS) if name == "prompt" else left
    if not 1 <= most <= left:
        wanted_tokens = f" and {most} of the answer" if most > left else ""
        raise ApiError(
            400, f"the context is {served.context} tokens; the request has {prompt} of its prompt{wanted_tokens}", name,
            "context_length_exceeded",
        )  # fmt: skip
    return most


def _prompts(served: Served, values: Mapping[str, Any]) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The name of the parameter that gives the prompts, and their tokens."""
    if "prompt" in values:
        return "prompt", tuple(_tokens(served, "prompt", prompt) for prompt in values["prompt"])
    name = "messages" if "messages" in values else "input"
    messages = values[name]
    if "instructions" in values:
        messages = [{"role": "system", "content": values["instructions"]}, *messages]
    template = served.tokenizer.chat_template
    variables = _variables(served, values)
    if template is None:
        return name, (_tokens(served, name, "\n".join(message["content"] for message in messages)),)
    try:
        ids = served.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **variables
        )
    except TEMPLATE_FAILED as error:
        what = f"the model's chat template refuses this: {str(error)[:MOST_QUOTED]}"
        raise ApiError(400, what, name, "invalid_value") from None
    return name, (_checked(served, name, ids),)


def _variables(served: Served, values: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the chat template. A variable that the template never reads is refused."""
    variables = dict(values.get("chat_template_kwargs", {}))
    given = dict.fromkeys(variables, "chat_template_kwargs")
    if "reasoning_effort" in values:
        variables["reasoning_effort"], given["reasoning_effort"] = values["reasoning_effort"], "reasoning_effort"
    known = templates.variables(templates.source(served.tokenizer)) if given and served.tokenizer.chat_template else ()
    for variable, param in given.items():
        if variable not in known:
            what = f"{param}: this model's chat template has no variable {variable[:64]!r}"
            raise ApiError(400, what, param, "unsupported_parameter")
    return variables


def _tokens(served: Served, name: str, prompt: str | Sequence[int]) -> tuple[int, ...]:
    return _checked(served, name, served.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)


def _checked(served: Served, name: str, ids: Sequence[int]) -> tuple[int, ...]:
    if not ids:
        raise ApiError(400, f"{name}: expected at least one token", name, "invalid_value")
    if max(ids) >= served.vocabulary:
        raise ApiError(400, f"{name}: expected token ids below {served.vocabulary}", name, "invalid_value")
    return tuple(ids)
