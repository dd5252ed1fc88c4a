"""Every parameter of every route: what works, and what is refused in OpenAI's form."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lancebill.serving.parameters import CHAT, COMPLETION, RESPONSE, ApiError, Read, read_parameters
from lancebill.serving.sampling import Sampling, choose

SAYS = [{"role": "user", "content": "hello"}]
TABLES: dict[str, Mapping[str, Read]] = {"messages": CHAT, "prompt": COMPLETION, "input": RESPONSE}
# For each parameter, values that work, then values that are refused.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["m"], [7, ["m"], "\ud800"]),
    "messages": (
        [SAYS, [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *SAYS]],
        [[], "hello", [7], [{"role": "user"}], [{"role": "robot", "content": "x"}], [{"role": "user", "content": []}],
         [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
         [{"role": "user", "content": "x", "tool_calls": [{}]}], [{"role": "tool", "content": "x"}],
         [{"role": "user", "content": "x", "name": "Ada"}], [{"role": "user", "content": "x", "id": "a"}],
         [{"role": "user", "content": [{"type": "text", "text": "x", "bogus": 5}]}]],
    ),
    "prompt": (["x", ["x", "y"], [1, 2], [[1, 2], [3]]], [[], [[]], [1.5], [True], ["x", 1], {"x": 1}, 7, [-1]]),
    "input": (["x", SAYS], [[], 7, [{"type": "function_call_output", "role": "user", "content": "x"}]]),
    "max_tokens": ([1, 100], ["abc", 0, -1, 1.5, True, 2**40]),
    "max_completion_tokens": ([1], ["abc", 0, False]),
    "max_output_tokens": ([1], ["abc", 0]),
    "temperature": ([0, 0.7, 2], ["hot", -1, 2.1, True, 10**400]),
    "top_p": ([0.1, 1], [0, 1.1, "x"]),
    "top_k": ([0, 40], [-1, 1.5]),
    "min_p": ([0, 0.05, 1], [-0.1, 1.1, "x"]),
    "n": ([1, 8], [0, 9, "2"]),
    "stop": (["x", ["x", "y"]], ["", [""], [1], ["x"] * 17, {}]),
    "stream": ([True, False], [1, "true"]),
    "stream_options": ([{"include_usage": True}, {}], [True, {"other": 1}, {"include_usage": 1}]),
    "seed": ([0, -5], ["x", 1.5]),
    "presence_penalty": ([-2, 2], [3, "x"]),
    "frequency_penalty": ([-2, 2], [3, "x"]),
    "repetition_penalty": ([1, 0.5, 1.1], [0, -1, "x", 10**400, True]),
    "logit_bias": (
        [{"5": 10}, {}],
        [{"x": 1}, {"5": 101}, {"5": True}, {"5": 10**400}, {"5": -(10**400)}, [5], {"-1": 1}, {"²": 1}],
    ),
    "top_logprobs": ([0], [21, -1, "x"]),
    "response_format": ([{"type": "text"}], [{"type": "json_object"}, {"type": "json_schema"}, "text"]),
    "tools": ([[]], [[{"type": "function", "function": {"name": "f"}}], {}]),
    "tool_choice": (["none", "auto"], ["required", {"type": "function"}]),
    "parallel_tool_calls": ([True], ["yes"]),
    "user": (["x"], [7]),
    "safety_identifier": (["x"], [7]),
    "prompt_cache_key": (["x"], [7]),
    "service_tier": (["auto"], ["flex"]),
    "store": ([False], [True, 0]),
    "modalities": ([["text"]], [["text", "audio"]]),
    "reasoning_effort": (["low"], [1]),
    "chat_template_kwargs": ([{"enable_thinking": False}], ["x", []]),
    "echo": ([False], [True, 0]),
    "best_of": ([1], [2, True]),
    "instructions": (["x"], [7]),
    "text": ([{"format": {"type": "text"}}], [{"format": {"type": "json_schema"}}]),
    "background": ([False], [True]),
    "truncation": (["disabled"], ["auto"]),
    "include": ([[]], [["reasoning.encrypted_content"]]),
}  # fmt: skip
REFUSED = [
    "functions",
    "function_call",
    "audio",
    "prediction",
    "verbosity",
    "web_search_options",
    "suffix",
    "reasoning",
]
REFUSED += ["previous_response_id", "conversation", "max_tool_calls"]


def refusal(table: Mapping[str, Read], body: Mapping[str, Any]) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        read_parameters(table, body, [])
    assert 400 <= caught.value.status < 500
    error: dict[str, Any] = json.loads(json.dumps(caught.value.body(), ensure_ascii=False).encode())["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize("route", TABLES)
def test_every_parameter_works_or_is_refused(route: str) -> None:
    table = TABLES[route]
    own = {"messages": {"logprobs": ([True, False], [1, "x"])}, "prompt": {"logprobs": ([0, 5], [True, 21])}}
    own["input"] = {"top_logprobs": ([0], [5]), "stream_options": ([], [{}]), "prompt": ([], [{"id": "x"}])}
    own["input"]["metadata"], own["messages"]["metadata"] = ([{"a": "b"}], [{"a": 1}, []]), ([], [{"a": "b"}])
    for name, (good, bad) in {**VALUES, **own.get(route, {})}.items():
        if name in table:
            for value in good:
                assert name in read_parameters(table, {name: value}, []), (name, value)
            for value in bad:
                assert refusal(table, {name: value})["param"] == name, (name, value)
    for name in REFUSED:
        expected = "unsupported_parameter" if name in table else "unknown_parameter"
        assert refusal(table, {name: "x"})["code"] == expected
        assert read_parameters(table, {"model": "m", name: None}, []) == {"model": "m"}, "null counts as absent"
    untested = set(table) - set(VALUES) - set(REFUSED) - set(own.get(route, {}))
    assert not untested, "every parameter of a table has examples here"
    with pytest.raises(ApiError, match="missing"):
        read_parameters(table, {}, ["model", route])


def test_expected_values_are_shown_as_json() -> None:
    assert "expected false;" in refusal(COMPLETION, {"echo": True})["message"]
    assert 'expected {"type": "text"};' in refusal(CHAT, {"response_format": {"type": "json_object"}})["message"]


def test_half_a_character_is_quoted_in_ascii() -> None:
    assert refusal(CHAT, {"\ud800": 1})["param"] == "\\ud800"
    message = refusal(CHAT, {"messages": [{"role": "user", "content": "x", "\ud800": 1}]})["message"]
    assert "ud800" in message


def test_a_reply_may_be_sent_back() -> None:
    """Its nulls and empty lists say nothing."""
    nothing = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls"))
    answer = {"role": "assistant", "content": "hi", "annotations": [], **nothing}
    read = read_parameters(CHAT, {"messages": [*SAYS, answer]}, [])
    assert read["messages"] == [*SAYS, {"role": "assistant", "content": "hi"}]
    part = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert read_parameters(RESPONSE, {"input": [*SAYS, item]}, [])["input"] == read["messages"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "user", "content": "x", "name": "Ada"},
        {"role": "user", "content": [{"type": "text", "text": "x", "name": 5}]},
    ],
)
def test_a_refused_message_is_named(wrong: Mapping[str, Any]) -> None:
    said = refusal(CHAT, {"messages": [*SAYS, wrong]})["message"]
    assert "message 1" in said and "'name'" in said


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(900), [])
ODD = [
    True,
    0,
    -1,
    1e308,
    10**400,
    "",
    "\ud800",
    "x" * 5000,
    DEEP,
    {"x": DEEP},
    {"5": 10**400},
    [],
    [None],
    [[]],
    [{}],
    {},
    {"": None},
    {"x": {"y": []}},
]


def test_no_value_does_anything_but_work_or_be_refused() -> None:
    values = [*ODD, *(value for good, bad in VALUES.values() for value in (*good, *bad))]
    for table in TABLES.values():
        for name, value in itertools.product(table, values):
            try:
                read_parameters(table, {name: value}, [])
            except ApiError as error:
                assert error.status == 400 and error.param == name
                json.dumps(error.body(), ensure_ascii=False).encode()


def test_sampling() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    source = torch.Generator().manual_seed(0)

    def drawn(**how: Any) -> set[int]:
        return {choose(logits, Sampling(**how), [1, 1, 2], source).id for _ in range(200)}

    assert drawn() == {1} and drawn(temperature=1.0, top_k=1) == {1}
    assert drawn(temperature=1.0, top_k=2) == {1, 2} and drawn(temperature=2.0) == {0, 1, 2, 3}
    assert drawn(temperature=1.0, top_p=0.5) == {1} and drawn(temperature=1.0, top_p=0.7) == {1, 2}
    assert drawn(frequency_penalty=1.5) == {0} and drawn(presence_penalty=1.5) == {1}  # 3 - 2 * 1.5; 3 - 1.5 ties lose
    assert drawn(logit_bias={3: 100.0}) == {3} and drawn(logit_bias={1: -100.0}) == {2}
    token = choose(logits, Sampling(top_logprobs=2), [], source)
    expected = logits.log_softmax(-1)
    assert token.logprob == pytest.approx(expected[1].item()) and [i for i, _ in token.alternatives] == [1, 2]
    same = [choose(logits, Sampling(1.0), [], Sampling(seed=5).generator()).id for _ in range(9)]
    assert len(set(same)) == 1, "a seed decides"
