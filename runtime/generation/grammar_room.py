"""Grammars in a process of their own, within limits of time and memory, for as long as an answer takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.closing import Closing
from edge_run.base.errors import ConfigError, NotSupported
from edge_run.runtime.processes.cell import Cell, Overrun

LOADING_S = 120.0
MOST_GRAMMAR_BYTES = 8 << 20
_JOBS = "edge_run.runtime.generation.grammar_jobs"


class GrammarRoom(Closing):
    """Where the grammars of one model run; the process is started for the first. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """path: the model's file, or its first shard: the vocabulary is loaded from there."""
        self._path = path
        self._cell = Cell(_JOBS)

    def open(self, name: str, text: str, n_vocab: int) -> RoomedGrammar:
        """Open a grammar, called `name` in errors, or a JSON schema; it takes the place of the last one.

        Raises ConfigError for one that llama.cpp cannot use, or that takes too much; NotSupported, KernelError.
        """
        if len(text) > MOST_GRAMMAR_BYTES:
            raise ConfigError(f"{name}: {len(text):,} characters, {MOST_GRAMMAR_BYTES:,} are the most; simplify it")
        try:
            self._cell.ask("load_vocabulary", LOADING_S, path=os.fspath(self._path))
            self._cell.ask("open_grammar", is_first=False, n_vocab=n_vocab, name=name, text=text)
        except Overrun as overrun:
            raise ConfigError(f"{name}: reading it {overrun}; simplify it") from None
        return RoomedGrammar(self._cell, name, n_vocab)

    def close(self) -> None:
        """End the process. A later grammar starts another one."""
        self._cell.close()


class RoomedGrammar:
    """A `LocalGrammar` in another process. Every method raises NotSupported where its rules take too much."""

    def __init__(self, cell: Cell, name: str, n_vocab: int) -> None:
        self._cell, self._name, self._n_vocab = cell, name, n_vocab
        self._fitting: int | None = None

    def fits(self, token: int) -> bool:
        """Return whether `token` may come next."""
        if token == self._fitting:
            return True
        is_right = self._ask("fits", token=token) == b"\1"
        self._fitting = token if is_right else None
        return is_right

    def refused(self) -> NDArray[np.bool_]:
        """Return which tokens must not come next, `(n_vocab,)`."""
        bits = np.frombuffer(self._ask("refused"), np.uint8)
        return np.unpackbits(bits, count=self._n_vocab).astype(bool)

    def accept(self, token: int) -> None:
        """Go on by `token`, which must fit."""
        self._fitting = None
        self._ask("accept", token=token)

    def close(self) -> None:
        """Leave the room as it is: the next grammar takes this one's place."""

    def _ask(self, job: str, **fields: Any) -> bytes:
        try:
            return self._cell.ask(job, is_first=False, **fields)
        except Overrun as overrun:
            raise NotSupported(f"{self._name}: the next token of the answer {overrun}; simplify it") from None
