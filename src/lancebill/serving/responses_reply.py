"""The JSON of replies to `/v1/responses`: one object, or the events that build it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from lancebill.serving.generation import Generation
from lancebill.serving.replies import new_id
from lancebill.serving.requests import Served


class ResponsesReply:
    """A response with one message of one text."""

    def __init__(self, served: Served, values: Mapping[str, Any]) -> None:
        self._item = new_id("msg_")
        self._head = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": served.name,
            "error": None,
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get("max_output_tokens"),
            "metadata": values.get("metadata", {}),
            "parallel_tool_calls": values.get("parallel_tool_calls", True),
            "temperature": values.get("temperature", served.defaults.temperature),
            "top_p": values.get("top_p", served.defaults.top_p),
            "tool_choice": values.get("tool_choice", "auto"),
            "tools": [],
            "store": False,
        }

    async def whole(self, generation: Generation) -> dict[str, Any]:
        text, finish = "", None
        async for piece in generation.pieces():
            text, finish = text + piece.text, piece.finish
        return self._ended(generation, text, finish)

    async def events(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        number = 0
        async for event in self._unnumbered(generation):
            yield {**event, "sequence_number": number}
            number += 1

    async def _unnumbered(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        item = {"type": "response.output_item.added", "output_index": 0}
        yield {**item, "item": {**self._message("", "in_progress"), "content": []}}
        yield {"type": "response.content_part.added", **place, "part": self._part("")}
        text, finish = "", None
        async for piece in generation.pieces():
            text, finish = text + piece.text, piece.finish
            if piece.text:
                yield {"type": "response.output_text.delta", **place, "delta": piece.text, "logprobs": []}
        ended = self._ended(generation, text, finish)
        yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": self._part(text)}
        yield {"type": "response.output_item.done", "output_index": 0, "item": ended["output"][0]}
        yield {"type": f"response.{ended['status']}", "response": ended}

    def _ended(self, generation: Generation, text: str, finish: str | None) -> dict[str, Any]:
        status = "incomplete" if finish == "length" else "completed"
        prompt, generated = generation.prompt_tokens, generation.generated_tokens
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
            "output": [self._message(text, status)],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": generation.cached_tokens},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + generated,
            },
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [self._part(text)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
