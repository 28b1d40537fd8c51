"""What all requests share: the models, who is let in, what a request is read into, and what is counted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import TypeVar

from starlette.requests import Request

from edge_run.runtime.processes.fair_room import FairRoom
from edge_run.runtime.server.access import whose
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.bodies import BODY, BodyRoom
from edge_run.runtime.server.catalogue.catalogue import Catalogue, OpenModel
from edge_run.runtime.server.catalogue.folder import ModelEntry
from edge_run.runtime.server.catalogue.served_model import AnswerDefaults, Preparing, ServedModel
from edge_run.runtime.server.counts import Counts
from edge_run.runtime.server.refusals import Refusal, shutting_down
from edge_run.runtime.server.tasks import until_client_leaves

MOST_NUMBERS = 1 << 22  # of the vectors of one answer: as text, some 20 bytes each
FEW_NUMBERS = 1 << 16
_Kind = TypeVar("_Kind")


class Service:
    """A server without HTTP. Belongs to one event loop.

    catalogue: the models. defaults: what counts where a request says nothing. version: of edge-run.
    encoding: one answer with vectors at a time becomes JSON, which takes much memory meanwhile.
    """

    def __init__(
        self, catalogue: Catalogue, admission: Admission, defaults: AnswerDefaults | None = None, version: str = ""
    ) -> None:
        self.catalogue, self.admission = catalogue, admission
        self.defaults, self.version = defaults or AnswerDefaults(), version
        self.began_s = int(time.time())
        self._counts: dict[str, Counts] = {}
        self._room = BodyRoom()
        self._preparing = Preparing()
        self._few_numbers, self._many_numbers = FairRoom(MOST_NUMBERS), FairRoom(2 * MOST_NUMBERS)
        self.encoding = FairRoom(1)

    async def read(self, request: Request, kind: type[_Kind]) -> _Kind:
        """Return the body of a request as a `kind`. Raises Refusal."""
        return await self._room.read(request, kind)

    def numbers(self, n_numbers: int, key: str) -> contextlib.AbstractAsyncContextManager[object]:
        """Return a block that waits for room for so many numbers of an answer, and holds it.

        Those that are few have room of their own, so that they need not wait for answers of very many.
        """
        room = self._few_numbers if n_numbers <= FEW_NUMBERS else self._many_numbers
        return room.held(key, n_numbers)

    @contextlib.asynccontextmanager
    async def hold(self, entry: ModelEntry, key: str = "") -> AsyncIterator[ServedModel]:
        """Have a model open for a key in this block, once it is its turn. Raises Refusal, and what `Model` raises."""
        async with self.catalogue.hold(entry) as found:
            yield self._served(found, key)

    @contextlib.asynccontextmanager
    async def visit(self, entry: ModelEntry, request: Request) -> AsyncIterator[ServedModel]:
        """Have a model open for what is done at once, until the client leaves. Raises what `hold` raises, and Refusal.

        Where it is not at hand, that waits in the queue, as answers do: so many may, and not past the server's end.
        The room of the request's body is given back at the end of the block, and not when the answer is read.
        """
        with request.scope.get(BODY) or contextlib.nullcontext():
            async with self._visited(entry, request) as served:
                yield served

    @contextlib.asynccontextmanager
    async def _visited(self, entry: ModelEntry, request: Request) -> AsyncIterator[ServedModel]:
        key = whose(request.scope)
        if self.catalogue.is_at_hand(entry):
            async with _while_client_waits(request), self.hold(entry, key) as served:
                yield served
            return
        with self.admission.place(entry.name, key) as place:
            with place.scope:
                async with _while_client_waits(request), self.hold(entry, key) as served:
                    yield served
            if place.scope.cancelled_caught:
                raise shutting_down()

    @property
    def open(self) -> ServedModel | None:
        """The model that is open, to look at: it may be closed at any `await`."""
        return self._served(self.catalogue.open) if self.catalogue.open else None

    async def look(self, request: Request) -> ServedModel | None:
        """Return the model that is open, to look at; of a server with one model, once that is open.

        Raises what `visit` raises.
        """
        if not self.catalogue.is_usable:
            async with self.visit(self.catalogue.asked(None), request):
                pass
        return self.open

    def since_s(self, entry: ModelEntry) -> int:
        """Return since when a model is what it is: when its file was written, where that was looked at."""
        return entry.changed_ns // 10**9 or self.began_s

    def counts_of(self, name: str) -> Counts:
        """Return what requests for a model came to."""
        return self._counts.setdefault(name, Counts())

    @property
    def counts(self) -> Counts:
        """What all requests came to."""
        return Counts.together(self._counts.values())

    def _served(self, found: OpenModel, key: str = "") -> ServedModel:
        name = found.entry.name
        counts = self.counts_of(name)
        return ServedModel(
            name, found.model, found.answering, self.defaults, self._preparing, counts, found.forecast, key
        )


@contextlib.asynccontextmanager
async def _while_client_waits(request: Request) -> AsyncIterator[None]:
    """Have this block ended when the client of a request, whose body was read, leaves. Raises Refusal then."""
    async with until_client_leaves(request.receive) as client:
        yield
    if client.is_over:
        raise Refusal(400, "the client went away before it had its answer", closes=True)
