"""Grammars in a process of their own, within limits of time and memory, for as long as their answers take."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.closing import Closing
from edge_run.base.errors import ConfigError, EdgeRunError, NotSupported
from edge_run.base.protocols import Clock
from edge_run.runtime.processes.cell import Cell, Lost, Overrun

LOADING_S = 120.0
MOST_S = 10.0  # that the grammar of an answer may take, and for each token as long as so many steps of a plain one:
MOST_PLAIN_STEPS = 30  # JSON takes 2 to 7, a call of one of 128 tools up to 14
MOST_GRAMMAR_BYTES = 8 << 20
_JOBS = "edge_run.runtime.grammars.jobs"


class GrammarRoom(Closing):
    """Where the grammars of one model run, in one process, which is started for the first. `open` is thread-safe."""

    def __init__(self, path: Path, clock: Clock = time.monotonic) -> None:
        """path: the model's file, or its first shard: the vocabulary is loaded from there."""
        self._path, self._clock = path, clock
        self._cell, self._numbers = Cell(_JOBS), itertools.count()
        self._opening = threading.RLock()  # the steps of one follow each other

    def open(self, name: str, text: str, n_vocab: int) -> RoomedGrammar:
        """Open a grammar, called `name` in errors, or a JSON schema. Close it when its answer has ended.

        Raises ConfigError for one that llama.cpp cannot use, or that takes too much; NotSupported, KernelError.
        """
        if len(text) > MOST_GRAMMAR_BYTES:
            raise ConfigError(f"{name}: {len(text):,} characters, {MOST_GRAMMAR_BYTES:,} are the most; simplify it")

        def load(number: int) -> float:
            with self._opening:
                while True:
                    measured = self._cell.ask("load_vocabulary", LOADING_S, path=os.fspath(self._path))
                    with contextlib.suppress(Lost):  # another one, that was asked something meanwhile, ended it
                        self._cell.ask(
                            "open_grammar", is_first=False, number=number, n_vocab=n_vocab, name=name, text=text
                        )
                        return float(measured)

        grammar = RoomedGrammar(self._cell, name, n_vocab, next(self._numbers), load, self._clock)
        try:
            grammar.load()
        except Overrun as overrun:
            raise ConfigError(f"{name}: reading it {overrun}; simplify it") from None
        return grammar

    def close(self) -> None:
        """End the process. A later grammar starts another one."""
        self._cell.close()


class RoomedGrammar:
    """A `LocalGrammar` in another process. Every method raises NotSupported where its rules take too much.

    The answers that share a model's passes wait for it, so the time that it takes is counted for the whole answer.
    Where another grammar has ended the process that both were in, this one is opened anew in the next.
    """

    def __init__(
        self, cell: Cell, name: str, n_vocab: int, number: int, load: Callable[[int], float], clock: Clock
    ) -> None:
        """load: opens the grammar in the cell, under a number, and returns how long a step of a plain one takes."""
        self._cell, self._name, self._n_vocab, self._number, self._load = cell, name, n_vocab, number, load
        self._clock, self._taken_s, self._plain_step_s = clock, 0.0, 0.0
        self._fitting: int | None = None
        self._accepted: list[int] = []
        self._process = 0  # of the cell, in which it is open

    def load(self) -> None:
        """Open it in the cell, as far as it has come. Raises Overrun."""
        self._plain_step_s = self._load(self._number)
        self._process = self._cell.n_started
        if self._accepted:
            self._cell.ask("accept", is_first=False, number=self._number, tokens=self._accepted)

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
        self._ask("accept", tokens=[token])
        self._accepted.append(token)

    def close(self) -> None:
        """Free it, if its process still runs. Idempotent."""
        if self._is_there:
            with contextlib.suppress(EdgeRunError):
                self._cell.ask("close_grammar", is_first=False, number=self._number)

    @property
    def _is_there(self) -> bool:
        return self._process == self._cell.n_started and self._cell.is_alive

    def _ask(self, job: str, **fields: Any) -> bytes:
        try:
            if not self._is_there:
                self.load()
            began_s = self._clock()
            reply = self._cell.ask(job, is_first=False, number=self._number, **fields)
            self._taken_s += self._clock() - began_s
        except Overrun as overrun:
            raise NotSupported(f"{self._name}: the next token of the answer {overrun}; simplify it") from None
        n_tokens, taken_s = len(self._accepted) + 1, self._taken_s
        if taken_s > MOST_S + MOST_PLAIN_STEPS * self._plain_step_s * n_tokens:
            raise NotSupported(
                f"{self._name}: has taken {taken_s:.1f} s for {n_tokens} tokens of the answer; simplify it"
            )
        return reply
