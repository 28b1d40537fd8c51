"""Vectors of texts on the wire: computed in turn with those of others, and written as one document."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
from starlette.types import Receive, Scope, Send

from edge_run.base.errors import ContextFull, EdgeRunError
from edge_run.runtime.embedding.results import Vectors
from edge_run.runtime.embedding.texts import Text, TextTokens
from edge_run.runtime.server.admission import Place
from edge_run.runtime.server.answers import json_response
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.service import Service

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


@dataclass(frozen=True, slots=True)
class Computed:
    """The vectors of the texts of a request. of_texts: `(rows, width)` each. seconds: since it came in."""

    of_texts: Sequence[Vectors]
    tokens: int
    seconds: float


class EmbeddingResponse:
    """An ASGI response that computes vectors. It ends that when its client goes away, or when it is cancelled.

    Texts are computed as many at a time as share a pass, and then it is another request's turn: one with a thousand
    texts does not hold up one with a single text.
    """

    def __init__(
        self,
        service: Service,
        texts: TextTokens,
        document: Callable[[Computed], Any],
        *,
        normalize: bool = True,
    ) -> None:
        """Respond to a request for the vectors of `texts` with what `document` makes of them."""
        self._service, self._texts, self._document, self._normalize = service, texts, document, normalize

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises Refusal, or an error of ours."""
        counts, reason, found = self._service.counts, "abort", None
        with self._service.admission.place() as place:
            try:
                async with anyio.create_task_group() as group:

                    async def watch() -> None:
                        while (await receive())["type"] != "http.disconnect":
                            pass
                        group.cancel_scope.cancel()

                    group.start_soon(watch, name="edge-run-watch-client")
                    with place.scope:
                        found = await self._compute(place)
                    group.cancel_scope.cancel()
            except BaseExceptionGroup as failures:
                reason = "error" if isinstance(failures.exceptions[0], EdgeRunError) else reason
                raise failures.exceptions[0] from failures.exceptions[0].__cause__
            finally:
                counts.request_s.add(place.age_s)
                counts.end("stop" if found else reason)
            if found:
                counts.prompt_tokens += found.tokens
                await json_response(self._document(found))(scope, receive, send)
            elif place.scope.cancelled_caught:
                raise Refusal(503, "the server is shutting down", code="shutting_down")

    async def _compute(self, place: Place) -> Computed:
        of_texts, together = list[Vectors](), self._service.model.most_parallel
        for first in range(0, len(self._texts.tokens), together):
            group = self._texts.tokens[first : first + together]
            embedded = await self._service.answering.embed(group, normalize=self._normalize)
            of_texts += [embedded.of(number) for number in range(len(group))]
            if not place.has_begun:
                place.begin()
                self._service.counts.first_token_s.add(place.age_s)
        return Computed(of_texts, sum(map(len, self._texts.tokens)), place.age_s)


async def embedding_tokens(service: Service, texts: Text | Sequence[Text], *, truncate: bool = False) -> TextTokens:
    """Return the tokens of a request's texts. Raises Refusal, and errors of ours that say which text is wrong."""
    try:
        return await service.prepare(lambda: service.model.text_tokens(texts, truncate=truncate))
    except ContextFull as error:
        raise Refusal(400, str(error), param="input", code="context_length_exceeded") from error


def listed(vectors: Vectors) -> list[list[float]]:
    """Return the rows as lists of numbers."""
    return [row.tolist() for row in np.asarray(vectors)]
