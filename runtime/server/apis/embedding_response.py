"""Vectors of texts on the wire: computed in turn with those of others, and written as one document."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_run.base.errors import Cancelled, ContextFull
from edge_run.base.protocols import Text
from edge_run.runtime.embedding.results import EmbeddingShape, Vector, Vectors
from edge_run.runtime.server.access import whose
from edge_run.runtime.server.admission import Place
from edge_run.runtime.server.answers import JSON
from edge_run.runtime.server.bodies import BODY
from edge_run.runtime.server.catalogue.folder import ModelEntry
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.refusals import CONTEXT_LENGTH_EXCEEDED, Refusal, shutting_down
from edge_run.runtime.server.service import MOST_NUMBERS, Service
from edge_run.runtime.server.tasks import until_client_leaves


@dataclass(frozen=True, slots=True)
class Computed:
    """The vectors of the texts of a request, as JSON. of_texts: rows of each. seconds: since it came in."""

    of_texts: Sequence[list[msgspec.Raw]]
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Found:
    """An answer, and how many tokens its texts have."""

    body: bytes
    tokens: int


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
    texts does not hold up one with a single text, unless both want very many numbers (`Service.numbers`).
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
        key = whose(scope)
        with self._service.admission.place(self._entry.name, key) as place:
            try:
                async with until_client_leaves(receive) as client:
                    with place.scope:
                        async with self._service.hold(self._entry, key) as served:
                            found = await self._compute(served, place, scope)
            except Exception as error:
                reason = "abort" if isinstance(error, Cancelled) else "error"
                raise
            finally:
                counts.request_s.add(place.age_s)
                counts.end("stop" if found else reason)
        if found:
            counts.prompt_tokens += found.tokens
            await Response(found.body, media_type=JSON)(scope, receive, send)
        elif not client.is_over:
            raise shutting_down()

    async def _compute(self, served: ServedModel, place: Place, scope: Scope) -> _Found:
        """Compute the vectors, with room for their numbers until they are JSON: who reads that slowly holds up nobody.

        What was asked, which takes more than the tokens that come of it, and its room are given back before.
        """
        if (shape := served.model.embedding) is None:
            raise no_embeddings(served.name)
        self._wanted.begin(shape)
        texts = await text_tokens(served, self._wanted.texts, truncate=self._wanted.truncate)
        wanted = self._wanted = dataclasses.replace(self._wanted, texts=())
        if asked := scope.get(BODY):
            asked.close()
        n_tokens, is_of_tokens = sum(map(len, texts)), shape.pooling == "none"
        n_numbers = shape.width * (n_tokens if is_of_tokens else len(texts))
        if n_numbers > MOST_NUMBERS:
            raise Refusal(400, f"{n_numbers:,} numbers are wanted, {MOST_NUMBERS:,} are the most: ask for fewer texts")
        normalize = wanted.is_normalized and not (wanted.keeps_token_lengths and is_of_tokens)
        key = whose(scope)
        async with self._service.numbers(n_numbers, key):
            vectors, together = list[Vectors](), served.model.most_parallel
            for first in range(0, len(texts), together):
                group = [list(tokens) for tokens in texts[first : first + together]]
                embedded = await served.answering.embed(group, normalize=normalize, key=key)
                vectors += [embedded.of(number) for number in range(len(group))]
                if not place.has_begun:
                    place.begin()
                    served.counts.first_token_s.add(place.age_s)
            async with self._service.encoding.held(key):
                body = await anyio.to_thread.run_sync(self._encoded, vectors, n_tokens, place.age_s)
        return _Found(body, n_tokens)

    def _encoded(self, vectors: list[Vectors], n_tokens: int, seconds: float) -> bytes:
        """Return the answer with these vectors, each of which is let go once it is JSON, as that takes much more."""
        encode, of_texts = self._wanted.encode, list[list[msgspec.Raw]]()
        for number, rows in enumerate(vectors):
            of_texts.append([msgspec.Raw(msgspec.json.encode(encode(vector))) for vector in rows])
            vectors[number] = rows[:0].copy()
        return msgspec.json.encode(self._document(Computed(of_texts, n_tokens, seconds)))


async def text_tokens(served: ServedModel, texts: Text | Sequence[Text], *, truncate: bool = False) -> list[array[int]]:
    """Return the tokens of a request's texts, 4 bytes each, as they may wait for long.

    Raises Refusal, and errors of ours that say which text is wrong.
    """

    def tokens() -> list[array[int]]:
        return [array("i", of_text) for of_text in served.model.text_tokens(texts, truncate=truncate).tokens]

    try:
        return await served.prepare(tokens)
    except ContextFull as error:
        raise Refusal(400, str(error), param="input", code=CONTEXT_LENGTH_EXCEEDED) from error


def no_embeddings(name: str) -> Refusal:
    """Return the refusal of vectors by a model that was opened to generate text."""
    return Refusal(
        400,
        f"{name} generates text here and makes no embeddings: serve it with --embeddings, or another model",
        param="model",
        code="not_supported",
    )
