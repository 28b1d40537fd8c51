"""Vectors of texts on the wire: computed in turn with those of others, and written as one document."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from starlette.types import Receive, Scope, Send

from edge_run.base.errors import Cancelled, ContextFull
from edge_run.runtime.embedding.results import EmbeddingShape, Vector, Vectors
from edge_run.runtime.embedding.texts import Text, TextTokens
from edge_run.runtime.server.access import whose
from edge_run.runtime.server.admission import Place
from edge_run.runtime.server.answers import json_response
from edge_run.runtime.server.catalogue.folder import ModelEntry
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.refusals import Refusal, shutting_down
from edge_run.runtime.server.service import MOST_NUMBERS, Service

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


@dataclass(frozen=True, slots=True)
class Computed:
    """The vectors of the texts of a request, as JSON. of_texts: rows of each. seconds: since it came in."""

    of_texts: Sequence[list[msgspec.Raw]]
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WantedVectors:
    """The texts whose vectors a request wants.

    truncate: whether texts that are too long are cut. is_normalized: whether vectors get the length 1, but where
    keeps_token_lengths those that a model makes of each token. begin: called when the model is open; raises Refusal for
    what it does not make. encode: one as JSON has it.
    """

    texts: Text | Sequence[Text]
    truncate: bool = False
    is_normalized: bool = True
    keeps_token_lengths: bool = False
    begin: Callable[[EmbeddingShape], None] = lambda shape: None
    encode: Callable[[Vector], Any] = lambda vector: vector.tolist()


class EmbeddingResponse:
    """An ASGI response that computes vectors. It ends that when its client goes away, or when it is cancelled.

    Texts are computed as many at a time as share a pass, and then it is another request's turn: one with a thousand
    texts does not hold up one with a single text.
    """

    def __init__(
        self,
        service: Service,
        entry: ModelEntry,
        wanted: WantedVectors,
        document: Callable[[Computed], Any],
    ) -> None:
        """Respond to a request for vectors, made by the model of `entry`, with what `document` makes of them."""
        self._service, self._entry, self._wanted, self._document = service, entry, wanted, document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises Refusal, or an error of ours."""
        counts, reason, found = self._service.counts_of(self._entry.name), "abort", None
        has_left, key = False, whose(scope)
        async with contextlib.AsyncExitStack() as holding:
            place = holding.enter_context(self._service.admission.place(self._entry.name, key))
            try:
                async with anyio.create_task_group() as group:

                    async def watch() -> None:
                        nonlocal has_left
                        while (await receive())["type"] != "http.disconnect":
                            pass
                        has_left = True
                        group.cancel_scope.cancel()

                    group.start_soon(watch, name="edge-run-watch-client")
                    with place.scope:
                        async with self._service.hold(self._entry, key) as served:
                            found = await self._compute(served, place, key, holding)
                    group.cancel_scope.cancel()
            except BaseExceptionGroup as failures:
                if not has_left:  # else it is the end of a pass that nobody waits for
                    reason = "abort" if isinstance(failures.exceptions[0], Cancelled) else "error"
                    raise failures.exceptions[0] from failures.exceptions[0].__cause__
            finally:
                counts.request_s.add(place.age_s)
                counts.end("stop" if found else reason)
            if found:
                counts.prompt_tokens += found.tokens
                await json_response(self._document(found))(scope, receive, send)
            elif not has_left:
                raise shutting_down()

    async def _compute(
        self, served: ServedModel, place: Place, key: str, holding: contextlib.AsyncExitStack
    ) -> Computed:
        """Compute the vectors. Room for them is held from before the first one until the answer is written."""
        if (shape := served.model.embedding) is None:
            raise no_embeddings(served.name)
        wanted = self._wanted
        wanted.begin(shape)
        texts = await text_tokens(served, wanted.texts, truncate=wanted.truncate)
        is_of_tokens = shape.pooling == "none"
        n_numbers = shape.width * (sum(map(len, texts.tokens)) if is_of_tokens else len(texts.tokens))
        if n_numbers > MOST_NUMBERS:
            raise Refusal(400, f"{n_numbers:,} numbers are wanted, {MOST_NUMBERS:,} are the most: ask for fewer texts")
        normalize = wanted.is_normalized and not (wanted.keeps_token_lengths and is_of_tokens)
        await holding.enter_async_context(self._service.numbers(n_numbers, key))
        found, together = list[Vectors](), served.model.most_parallel
        for first in range(0, len(texts.tokens), together):
            group = texts.tokens[first : first + together]
            embedded = await served.answering.embed(group, normalize=normalize)
            found += [embedded.of(number) for number in range(len(group))]
            if not place.has_begun:
                place.begin()
                served.counts.first_token_s.add(place.age_s)
        of_texts = await anyio.to_thread.run_sync(self._encoded, found)
        return Computed(of_texts, sum(map(len, texts.tokens)), place.age_s)

    def _encoded(self, found: list[Vectors]) -> list[list[msgspec.Raw]]:
        """Return the vectors of each text as JSON, which takes five times as much; `found` is empty then."""
        encode, of_texts = self._wanted.encode, list[list[msgspec.Raw]]()
        for number, vectors in enumerate(found):
            of_texts.append([msgspec.Raw(msgspec.json.encode(encode(vector))) for vector in vectors])
            found[number] = vectors[:0].copy()
        return of_texts


async def text_tokens(served: ServedModel, texts: Text | Sequence[Text], *, truncate: bool = False) -> TextTokens:
    """Return the tokens of a request's texts. Raises Refusal, and errors of ours that say which text is wrong."""
    try:
        return await served.prepare(lambda: served.model.text_tokens(texts, truncate=truncate))
    except ContextFull as error:
        raise Refusal(400, str(error), param="input", code="context_length_exceeded") from error


def no_embeddings(name: str) -> Refusal:
    """Return the refusal of vectors by a model that was opened to generate text."""
    return Refusal(
        400,
        f"{name} generates text here and makes no embeddings: serve it with --embeddings, or another model",
        param="model",
        code="not_supported",
    )
