"""One answer as it comes to a task: `AsyncStream`, what `Stream` is to a thread."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from edge_run.base.errors import Cancelled
from edge_run.base.results import Generation, Piece


class AsyncStream:
    """An async iterator of `Piece`s; the last one carries the `Generation`. For one task at a time.

    It has its turn until its end. Who leaves it before closes it, by `async with` or `aclose`: Python does so by itself
    only when nothing names it any more, and until then other answers may wait.
    """

    def __init__(self, pieces: AsyncGenerator[Piece, None]) -> None:
        self._pieces = pieces
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._generation: Generation | None = None

    def __repr__(self) -> str:
        reason = self.generation.finish_reason if self.generation else "not finished"
        return f"<{type(self).__name__}: {len(self._tokens)} tokens, {reason}>"

    @property
    def generation(self) -> Generation | None:
        """The finished answer with its figures; None before the last piece."""
        return self._generation

    @property
    def text(self) -> str:
        """What the answer has said so far: also where an error, a cancelled task or `aclose` ended it."""
        return "".join(self._texts)

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of `text`."""
        return tuple(self._tokens)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        piece = await anext(self._pieces)
        self._texts.append(piece.text)
        self._tokens += piece.token_ids
        self._generation = piece.generation
        return piece

    async def result(self) -> Generation:
        """Run to the end and return the finished answer with its figures.

        Raises what iterating raises, and Cancelled where the answer was ended before it finished.
        """
        async with self:
            async for _ in self:
                pass
        if self.generation is None:
            raise Cancelled("the answer was ended before it was finished")
        return self.generation

    async def aclose(self) -> None:
        """End the answer here. Idempotent."""
        await self._pieces.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
