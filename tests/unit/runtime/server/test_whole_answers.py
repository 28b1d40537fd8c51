"""A whole answer that tells how likely its tokens were: who asks for something else does not wait for that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server import answers
from edge_run.runtime.server.answers import AnswerResponse
from edge_run.runtime.server.generating import Job

pytestmark = pytest.mark.anyio
LIMIT_S = 20.0


async def answered(whole: Callable[[Any], bytes], top_logprobs: int | None) -> bytes:
    """Return what is sent of an answer that `whole` writes."""

    async def make_job(_: Any) -> Job:
        return Job([1], SamplingConfig(top_logprobs=top_logprobs))

    form = SimpleNamespace(begin=lambda *_: b"", whole=whole)
    model = SimpleNamespace(embedding=None, context_tokens=100, check_tokens=lambda *_: None)
    served = SimpleNamespace(model=model, answering=None, counts=None, name="model")
    response = AnswerResponse(None, None, make_job, form, False)  # type: ignore[arg-type]
    sender, receiver = anyio.create_memory_object_stream[Any](1)
    with sender, receiver:
        await response._answer(served, "", None, sender)  # type: ignore[arg-type]
        return bytes(receiver.receive_nowait())


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(answers, "generate", generate)


async def test_others_go_on_while_it_is_written() -> None:
    begun, may_end, has_gone_on = threading.Event(), threading.Event(), list[bool]()

    def whole(outcomes: Any) -> bytes:
        begun.set()
        has_gone_on.append(may_end.wait(LIMIT_S))
        return b"{}"

    async def go_on() -> None:
        while not begun.is_set():  # noqa: ASYNC110 - of a thread
            await anyio.sleep(0.01)
        may_end.set()

    async with anyio.create_task_group() as group:
        group.start_soon(go_on)
        assert await answered(whole, 2) == b"{}"
    assert has_gone_on == [True]


async def test_one_that_tells_of_no_others_is_written_at_once() -> None:
    threads = list[int]()

    def whole(outcomes: Any) -> bytes:
        threads.append(threading.get_ident())
        return b"{}"

    assert await answered(whole, None) == b"{}"
    assert threads == [threading.get_ident()]


async def test_what_fails_while_it_is_written_reaches_who_answers() -> None:
    def whole(outcomes: Any) -> bytes:
        raise MemoryError

    with pytest.raises(MemoryError):
        await answered(whole, 0)
