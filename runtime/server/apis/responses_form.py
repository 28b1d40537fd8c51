"""Responses of OpenAI's API, and the events of their streams: items that are added, go on, and are done."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edge_run.base.results import ToolCall
from edge_run.runtime.formats.output import Delta
from edge_run.runtime.server.answers import AnswerForm, event
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.generating import FinishedAnswer, Job
from edge_run.runtime.server.refusals import CONTEXT_LENGTH_EXCEEDED, Refusal
from edge_run.runtime.server.usage import openai_usage

_MESSAGE, _REASONING = "message", "reasoning"
_PARTS = {_MESSAGE: "output_text", _REASONING: "reasoning_text"}
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of OpenAI's own list


class ResponseForm(AnswerForm):
    """A response. told: what it repeats of the request.

    namespaced: the namespaces and names of functions that have one, by what the model calls them.
    """

    prompt_param = "input"
    streams_too_long = True

    def __init__(self, name: str, told: Mapping[str, Any]) -> None:
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": name,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "user": None,
            **told,
        }
        self.namespaced: Mapping[str, tuple[str, str]] = {}
        self._n_events = 0
        self._items: list[dict[str, Any]] = []
        self._open = ""
        self._text: list[str] = []

    def begin(self, served: ServedModel, job: Job) -> bytes:
        """Return the response that will be filled, where it has not begun before its model was open."""
        return b"" if self._n_events else self._begin()

    def piece(self, number: int, delta: Delta) -> bytes:
        """Return what an item goes on by."""
        if delta.call:
            return self._close() + self._add_call(delta.call)
        kind, text = (_REASONING, delta.reasoning) if delta.reasoning else (_MESSAGE, delta.content)
        if not text:
            return b""
        opening = b"" if self._open == kind else self._close() + self._begin_item(kind)
        self._text.append(text)
        return opening + self._part_event(f"response.{_PARTS[kind]}.delta", delta=text, **_logprobs(kind))

    def end(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return the whole response."""
        closing = self._close(_status(outcomes[0]))
        response = self._finished(outcomes, self._items)
        return closing + self._event(f"response.{response['status']}", response=response)

    def failed(self, refusal: Refusal) -> bytes:
        """Return the response that failed, which has begun before in any case."""
        opening = b"" if self._n_events else self._begin()
        code = _ERROR_CODES.get(refusal.status, "server_error")
        if refusal.code == CONTEXT_LENGTH_EXCEEDED:  # which clients know that shorten the conversation then
            code = refusal.code
        error = {"code": code, "message": refusal.message}
        return opening + self._event("response.failed", response={**self._response("failed"), "error": error})

    def silence(self) -> bytes:
        """Return once more that it goes on: clients leave a stream that has no event for minutes; comments are none.

        Without what may be long of the request, which its beginning repeats.
        """
        if not self._n_events:
            return self._begin()
        short = {key: value for key, value in self._response("in_progress").items() if key not in ("metadata", "text")}
        return self._event("response.in_progress", response={**short, "instructions": None, "tools": []})

    def whole(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return the response."""
        (outcome,) = outcomes
        items, status = list[dict[str, Any]](), _status(outcome)
        if outcome.reasoning:
            is_over = bool(outcome.content or outcome.calls)
            items.append(_item(_REASONING, "completed" if is_over else status, outcome.reasoning))
        if outcome.content or not outcome.calls:
            items.append(_item(_MESSAGE, "completed" if outcome.calls else status, outcome.content))
        items += map(self._call_item, outcome.calls)
        return msgspec.json.encode(self._finished(outcomes, items))

    def _begin(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _response(self, status: str, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **empty, "status": status, "output": list(output)}

    def _finished(self, outcomes: Sequence[FinishedAnswer], items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        usage = openai_usage(outcomes)
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        status = _status(outcomes[0])
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._response(status, items), "incomplete_details": why, "usage": counts}

    def _begin_item(self, kind: str) -> bytes:
        item = _item(kind, "in_progress")
        self._open = kind
        self._items.append(item)
        part = {"type": _PARTS[kind], "text": "", **({"annotations": []} if kind == _MESSAGE else {})}
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        return added + self._part_event("response.content_part.added", part=part)

    def _close(self, status: str = "completed") -> bytes:
        """End the item that is open, which has this status then."""
        if not self._open:
            return b""
        kind, text = self._open, "".join(self._text)
        item = {**_item(kind, status, text), "id": self._items[-1]["id"]}
        frames = [
            self._part_event(f"response.{_PARTS[kind]}.done", text=text, **_logprobs(kind)),
            self._part_event("response.content_part.done", part=item["content"][0]),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]
        self._items[-1] = item
        self._open, self._text = "", []
        return b"".join(frames)

    def _add_call(self, call: ToolCall) -> bytes:
        item = self._call_item(call)
        self._items.append(item)
        place = {"output_index": len(self._items) - 1}
        started = {**item, "arguments": "", "status": "in_progress"}
        change, name = {**place, "item_id": item["id"]}, item["name"]
        return (
            self._event("response.output_item.added", **place, item=started)
            + self._event("response.function_call_arguments.delta", **change, delta=call.arguments)
            + self._event("response.function_call_arguments.done", **change, name=name, arguments=call.arguments)
            + self._event("response.output_item.done", **place, item=item)
        )

    def _call_item(self, call: ToolCall) -> dict[str, Any]:
        namespace, name = self.namespaced.get(call.name, ("", call.name))
        return {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call.id,
            "name": name,
            **({"namespace": namespace} if namespace else {}),
            "arguments": call.arguments,
            "status": "completed",
        }

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._n_events
        self._n_events += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _status(outcome: FinishedAnswer) -> str:
    return "incomplete" if outcome.finish == "length" else "completed"


def _item(kind: str, status: str, text: str | None = None) -> dict[str, Any]:
    """Return an item of text; None is one that has only begun."""
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    if kind == _REASONING:
        content = [] if text is None else [part]
        return {"type": kind, "id": f"rs_{uuid.uuid4().hex}", "status": status, "summary": [], "content": content}
    content = [] if text is None else [{**part, "annotations": [], "logprobs": []}]
    return {"type": kind, "id": f"msg_{uuid.uuid4().hex}", "status": status, "role": "assistant", "content": content}


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == _MESSAGE else {}
