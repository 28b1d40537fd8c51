"""Visits at a model: a client that leaves uses none, and what is done at once waits where the model is not at hand."""

from __future__ import annotations

import anyio
import pytest
from starlette.requests import Request
from starlette.types import Message

from catalogues import Files, catalogue_of
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.service import Service

pytestmark = pytest.mark.anyio


class Client:
    """A client whose request was read, and who stays until `leaves` is set."""

    def __init__(self) -> None:
        self.leaves = anyio.Event()
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("is_at_hand", [False, True])
async def test_who_leaves_waits_for_no_model_and_uses_none(is_at_hand: bool) -> None:
    async with catalogue_of(Files()) as catalogue:
        service, client, ends = Service(catalogue, Admission(1)), Client(), list[str]()

        async def visit() -> None:
            try:
                async with service.visit(catalogue.asked("a" if is_at_hand else "b"), client.request):
                    await anyio.sleep_forever()
            except Refusal as refusal:
                ends.append(refusal.message)

        async with catalogue.hold(catalogue.asked("a")), anyio.create_task_group() as group:
            group.start_soon(visit)
            await anyio.wait_all_tasks_blocked()
            assert (service.admission.n_waiting, ends) == (int(not is_at_hand), [])
            client.leaves.set()
        assert (service.admission.n_waiting, ends) == (0, ["the client went away before it had its answer"])
        assert not catalogue._waiting


async def test_what_is_done_at_once_waits_in_the_queue_where_its_model_is_not_at_hand() -> None:
    async with catalogue_of(Files()) as catalogue:
        service = Service(catalogue, Admission(0))
        refused: list[Refusal] = []

        async def visit() -> None:
            try:
                async with service.visit(catalogue.asked("b"), Client().request):
                    pass
            except Refusal as refusal:
                refused.append(refusal)

        async with catalogue.hold(catalogue.asked("a")), anyio.create_task_group() as group:
            async with service.visit(catalogue.asked("a"), Client().request) as served:
                assert (served.name, service.admission.n_waiting) == ("a", 0)
            group.start_soon(visit)
            await anyio.wait_all_tasks_blocked()
            assert (service.admission.n_waiting, refused) == (1, [])
            await visit()
            assert [one.status for one in refused] == [429]
            service.admission.cancel()
        assert [one.status for one in refused] == [429, 503]
        assert service.admission.n_waiting == 0
        async with service.visit(catalogue.asked("b"), Client().request) as served:
            assert served.name == "b"
