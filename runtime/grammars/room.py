"""Grammars in a process of their own, within limits of time and memory, for as long as their answers take.

JSON schemas are converted in another one: the answers that share passes wait for the process of their grammars.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.closing import Closing
from edge_run.base.errors import Cancelled, ConfigError, EdgeRunError, NotSupported
from edge_run.runtime.grammars.schema_grammar import JSON_SCHEMA
from edge_run.runtime.processes.cell import Cell, LostProcess, Overrun

LOADING_S = 120.0
READING_S = 2.0  # of a grammar, which other answers may wait for meanwhile
MOST_S = 10.0  # of a schema, and of all that a grammar is asked; and for each token so many steps of a plain one:
MOST_PLAIN_STEPS = 30  # JSON takes 2 to 7, a call of one of 128 tools up to 14
MOST_GRAMMAR_LETTERS = 8 << 20
MOST_CONVERTED_LETTERS = 4 << 20  # of schemas that are remembered and their grammars, where there is more than one
_CLOSED = "the model was closed while a grammar was opened"
_JOBS, _CONVERTING = "edge_run.runtime.grammars.jobs", "edge_run.runtime.grammars.schema_grammar"


class GrammarRoom(Closing):
    """Where the grammars of one model run, in one process, which is started for the first. `open` is thread-safe."""

    def __init__(self, path: Path) -> None:
        """path: the model's file, or its first shard: the vocabulary is loaded from there."""
        self._path = path
        self._cell, self._converter, self._numbers = Cell(_JOBS), Cell(_CONVERTING), itertools.count()
        self._opening, self._converting = threading.Lock(), threading.Lock()  # the steps of one follow each other
        self._converted = dict[str, str]()  # schemas and their grammars, the latest last: several may wait for room
        self._n_closed = 0

    def open(self, name: str, text: str, n_vocab: int) -> RoomedGrammar:
        """Open a grammar, called `name` in errors, or a JSON schema. Close it when its answer has ended.

        Raises ConfigError for one that llama.cpp cannot use, or that takes too much; BudgetError where it must wait for
        the end of another one; NotSupported, KernelError; and Cancelled where the room is closed meanwhile.
        """
        _check_length(name, text)
        n_closed = self._n_closed
        try:
            if name == JSON_SCHEMA:
                text = self._convert(text)
            if self._n_closed != n_closed:
                raise Cancelled(_CLOSED)
            number = next(self._numbers)
            opening: dict[str, Any] = {"n_vocab": n_vocab, "name": name, "text": text}
            grammar = RoomedGrammar(self._cell, name, n_vocab, number, partial(self._load, number, opening))
            grammar.load()
            opening["is_again"] = True  # from now on, where another one ends the process
        except Overrun as overrun:
            raise ConfigError(f"{name}: reading it {overrun}; simplify it") from None
        return grammar

    def _convert(self, schema: str) -> str:
        """Return the grammar of a JSON schema, and remember it. Raises ConfigError, Overrun."""
        with self._converting:
            grammar = self._converted.pop(schema, None)
            if grammar is None:
                self._converter.ask("load", LOADING_S)
                grammar = self._converter.ask("convert", MOST_S, schema=schema).decode("utf-8", "surrogatepass")
                _check_length(f"{JSON_SCHEMA} as a grammar", grammar)
            self._converted[schema] = grammar
            n_letters = sum(len(one) + len(other) for one, other in self._converted.items())
            while n_letters > MOST_CONVERTED_LETTERS and len(self._converted) > 1:
                oldest = next(iter(self._converted))
                n_letters -= len(oldest) + len(self._converted.pop(oldest))
            return grammar

    def _load(self, number: int, opening: dict[str, Any], accepted: Sequence[int]) -> tuple[float, int]:
        """Open a grammar under `number`, and go on by the tokens `accepted`. Raises Overrun.

        Returns how long a step of a plain one takes, and in which process of the cell it is now.
        """
        n_closed = self._n_closed
        with self._opening:
            while self._n_closed == n_closed:
                measured = self._cell.ask("load_vocabulary", LOADING_S, path=os.fspath(self._path))
                with contextlib.suppress(LostProcess):  # a grammar that was asked something meanwhile ended the process
                    limit_s = MOST_S if accepted else READING_S  # one that goes on was read before
                    self._cell.ask("open_grammar", limit_s, is_first=False, number=number, **opening)
                    if accepted:
                        self._cell.ask("accept", is_first=False, number=number, tokens=list(accepted))
                    return float(measured), self._cell.n_started
        raise Cancelled(_CLOSED)

    def close(self) -> None:
        """End the processes. A later grammar starts others."""
        self._n_closed += 1
        self._converter.close()
        self._cell.close()


def _check_length(name: str, text: str) -> None:
    if len(text) > MOST_GRAMMAR_LETTERS:
        raise ConfigError(f"{name}: {len(text):,} characters, {MOST_GRAMMAR_LETTERS:,} are the most; simplify it")


class RoomedGrammar:
    """A `LocalGrammar` in another process. Every method raises NotSupported where its rules take too much.

    The answers that share a model's passes wait for it, so the time that it takes is counted for the whole answer.
    Where another grammar has ended the process that both were in, this one is opened anew in the next.
    """

    def __init__(
        self,
        cell: Cell,
        name: str,
        n_vocab: int,
        number: int,
        load: Callable[[Sequence[int]], tuple[float, int]],
    ) -> None:
        """load: opens it in the cell, as far as it has come, and returns what `GrammarRoom._load` does."""
        self._cell, self._name, self._n_vocab, self._number, self._load = cell, name, n_vocab, number, load
        self._taken_s = self._plain_step_s = 0.0
        self._fitting: int | None = None
        self._accepted: list[int] = []
        self._process = 0  # of the cell, in which it is open

    def load(self) -> None:
        """Open it in the cell, as far as it has come. Raises Overrun."""
        self._plain_step_s, self._process = self._load(self._accepted)

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
        if self._cell.is_asked:  # maybe by this thread, where the garbage collector came in the middle of a job
            threading.Thread(target=self._free, name="edge-run-grammar", daemon=True).start()
        else:
            self._free()

    def _free(self) -> None:
        if self._is_there:
            with contextlib.suppress(EdgeRunError):
                self._cell.ask("close_grammar", is_first=False, number=self._number)

    @property
    def _is_there(self) -> bool:
        return self._process == self._cell.n_started and self._cell.is_alive

    def _ask(self, job: str, **fields: Any) -> bytes:
        try:
            reply, taken_s = self._asked(job, fields)
        except Overrun as overrun:
            raise NotSupported(f"{self._name}: the next token of the answer {overrun}; simplify it") from None
        self._taken_s += taken_s
        n_tokens = len(self._accepted) + 1
        if self._taken_s > MOST_S + MOST_PLAIN_STEPS * self._plain_step_s * n_tokens:
            raise NotSupported(
                f"{self._name}: has taken {self._taken_s:.1f} s for {n_tokens} tokens of the answer; simplify it"
            )
        return reply

    def _asked(self, job: str, fields: dict[str, Any]) -> tuple[bytes, float]:
        """Return what a job gives, and the seconds that it took, without those in which others were asked."""
        while True:
            if not self._is_there:
                self.load()
            # lost to another grammar; or Ctrl-C ended the job, which is for whoever hears it, not for this answer
            with contextlib.suppress(LostProcess, Cancelled):
                return self._cell.timed(job, is_first=False, number=self._number, **fields)
