"""EmbeddingResponse: requests take turns, a client that leaves ends its work, and what went wrong is counted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from catalogues import open_catalogue
from edge_run.base.errors import Cancelled, KernelError
from edge_run.runtime.embedding.results import EmbeddingShape
from edge_run.runtime.embedding.texts import TextTokens
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.apis.embedding_response import MOST_NUMBERS, EmbeddingResponse, WantedVectors
from edge_run.runtime.server.bodies import BODY
from edge_run.runtime.server.refusals import Refusal, refusal_of
from edge_run.runtime.server.service import Service

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

pytestmark = pytest.mark.anyio


class FakeModel:
    """Computes two texts at a time; the vector of a text is its first token. turns: what was computed together."""

    def __init__(self) -> None:
        self.path, self.most_parallel, self.turns = Path("model.gguf"), 2, list[list[list[int]]]()
        self.forecast = lambda: None
        self.plan, self.trained_context_tokens, self.chat_template = SimpleNamespace(model_bytes=1), 8, ""
        self.embedding = EmbeddingShape("mean", 1, 8)
        self.goes_on, self.is_left, self._turn = anyio.Event(), False, anyio.Lock()
        self.error: Exception | None = None

    def metadata(self, key: str) -> None:
        return None

    def text_tokens(self, texts: list[list[int]], truncate: bool) -> TextTokens:
        return TextTokens(texts, ())

    async def embed(self, texts: list[list[int]], normalize: bool, key: str) -> Any:
        async with self._turn:
            self.turns.append(texts)
            try:
                await self.goes_on.wait()
            except anyio.get_cancelled_exc_class():
                self.is_left = True
                raise Cancelled("the pass was cancelled") from None  # as a thread's work ends
            if self.error:
                raise self.error
            await anyio.lowlevel.checkpoint()
            return SimpleNamespace(of=lambda number: np.array([[texts[number][0]]]))


class Client:
    """What ASGI sends to, and receives from."""

    def __init__(self) -> None:
        self.body, self.leaves = b"", anyio.Event()

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.body += message.get("body", b"")


def service_of(model: FakeModel) -> Service:
    return Service(open_catalogue(model), Admission(8))


@asynccontextmanager
async def responding(service: Service, *requests: tuple[Client, list[list[int]]]) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        for client, texts in requests:
            response = EmbeddingResponse(
                service,
                service.catalogue.asked(None),
                WantedVectors(texts),
                lambda computed: [row for rows in computed.of_texts for row in rows],
            )
            group.start_soon(response, {"type": "http"}, client.receive, client.send)
            await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(60):
            yield


async def test_requests_take_turns() -> None:
    model, many, one = FakeModel(), Client(), Client()
    service = service_of(model)
    async with responding(service, (many, [[1], [2], [3], [4], [5]]), (one, [[9, 9]])):
        assert service.admission.n_waiting == 2
        model.goes_on.set()
    assert model.turns == [[[1], [2]], [[9, 9]], [[3], [4]], [[5]]]
    assert (msgspec.json.decode(many.body), msgspec.json.decode(one.body)) == ([[1], [2], [3], [4], [5]], [[9]])
    assert service.counts.finished == {"stop": 2}
    assert service.counts.prompt_tokens == 7


async def test_so_many_numbers_are_the_most() -> None:
    model, client = FakeModel(), Client()
    model.embedding = EmbeddingShape("none", MOST_NUMBERS // 4, 8)
    model.goes_on.set()
    async with responding(service_of(model), (client, [[1, 2], [3, 4]])):
        pass
    assert client.body
    with pytest.raises(ExceptionGroup) as caught:
        async with responding(service_of(model), (client, [[1, 2], [3, 4, 5]])):
            pass
    assert isinstance(caught.value.exceptions[0], Refusal)


async def test_answers_of_very_many_numbers_wait_for_each_other_and_none_of_few_for_them() -> None:
    """What they hold together has a bound; who waits for room is among those that wait for their first token."""
    model, clients, one = FakeModel(), [Client() for _ in range(4)], Client()
    model.embedding = EmbeddingShape("mean", MOST_NUMBERS // 2, 8)
    service = service_of(model)
    async with responding(service, *((client, [[1], [2]]) for client in clients)):
        assert len(model.turns) == 1
        assert service._many_numbers.n_waiting() == 2
        assert service.admission.n_waiting == 4
        model.embedding = EmbeddingShape("mean", 1, 8)
        async with responding(service, (one, [[9]])):
            model.goes_on.set()
        assert model.turns[2] == [[9]]
    assert all(client.body for client in clients)
    assert not service._many_numbers.n_waiting()


async def test_what_was_asked_takes_no_room_while_it_is_computed_and_vectors_none_while_they_are_read() -> None:
    model, slow, reads = FakeModel(), Client(), anyio.Event()
    model.embedding = EmbeddingShape("mean", MOST_NUMBERS // 2, 8)
    service, asked = service_of(model), contextlib.ExitStack()

    async def read(message: Any) -> None:
        await reads.wait()
        await Client.send(slow, message)

    response = EmbeddingResponse(
        service, service.catalogue.asked(None), WantedVectors([[1], [2]]), lambda computed: computed.of_texts
    )
    has_room = anyio.Event()
    asked.callback(has_room.set)
    async with anyio.create_task_group() as group:
        group.start_soon(response, {"type": "http", BODY: asked}, slow.receive, read)
        with anyio.fail_after(60):
            await has_room.wait()
            assert not response._wanted.texts
            model.goes_on.set()
            others = [Client() for _ in range(3)]
            async with responding(service, *((other, [[1], [2]]) for other in others)):
                pass
            assert all(other.body for other in others)
            assert not slow.body
            reads.set()
    assert slow.body


async def test_a_client_that_leaves_ends_its_work() -> None:
    model, client = FakeModel(), Client()
    service = service_of(model)
    async with responding(service, (client, [[1], [2], [3]])):
        client.leaves.set()
    assert (model.is_left, len(model.turns), client.body) == (True, 1, b"")
    assert service.counts.finished == {"abort": 1}
    assert service.admission.n_waiting == service.admission.n_running == 0


async def test_what_goes_wrong_is_raised_and_counted() -> None:
    model, client = FakeModel(), Client()
    service = service_of(model)
    model.error = KernelError("the drive is gone")
    model.goes_on.set()
    with pytest.raises(ExceptionGroup) as caught:
        async with responding(service, (client, [[1]])):
            pass
    (error,) = caught.value.exceptions
    assert (type(error), str(error)) == (KernelError, "the drive is gone")
    assert service.counts.finished == {"error": 1}


async def test_a_server_that_ends_says_so() -> None:
    model, client = FakeModel(), Client()
    service = service_of(model)
    with pytest.raises(ExceptionGroup) as caught:
        async with responding(service, (client, [[1]])):
            service.admission.cancel()
    (error,) = caught.value.exceptions
    assert isinstance(error, Cancelled)
    assert refusal_of(error).status == 503
    assert service.counts.finished == {"abort": 1}
