"""Conversations with a model that streams, beside a draft model whose keys, values and weights are lent.

What is chosen, and by which logits, is what it is without a draft model: speculation is exact here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from eager import Eager
from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.units import KIB, MIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.streaming.lent_residency import LentResidency
from edge_run.tiers import _libc
from exactness import count_peak_from_here
from mutations import changed
from tiny_models import make_model

LONGEST_TOKENS = 1000
PRESENT, FROM_A_FILE, MAPPED_ONCE = (np.uint64(1 << bit) for bit in (63, 61, 56))  # of pages, to the kernel
OPTIONS: dict[str, Any] = {
    "context_tokens": 16_384,
    "micro_batch_tokens": 32,
    "draft_tokens": 8,
    "threads": 1,
    "check_file": False,
    "exact": True,
}


class Talk:
    """Feeds and continues one conversation; after each pass it looks at what the draft model has."""

    def __init__(self, engine: Engine) -> None:
        self.session: Session = open_session(engine)
        self.rows: list[np.ndarray] = []
        self.tokens: list[int] = []
        self.witness = Witness(engine) if engine.draft and engine.plan.mode == "streamed" else None

    def go_on(self, prompt: list[int], n_tokens: int) -> None:
        """Make `prompt` the conversation, and add the likeliest tokens."""
        logits, _ = self.session.feed(prompt)
        for _ in range(n_tokens):
            self.rows.append(np.array(logits))
            self.tokens.append(int(logits.argmax()))
            logits = self.session.step(self.tokens[-1])
            if self.witness:
                self.witness.look()


class Witness:
    """draft_bytes: what the draft model's keys and values held after each pass. counts: the loans then."""

    def __init__(self, engine: Engine) -> None:
        assert engine.draft
        assert engine.draft.cells
        lender = engine.draft.make_room.__self__  # type: ignore[attr-defined]
        assert isinstance(lender, LentResidency)
        self.lender, self.cells, self.caches = lender, engine.draft.cells, engine.draft._context.sparse_caches
        self.draft_bytes: list[int] = []
        self.counts: list[int] = []

    def look(self) -> None:
        room, loans = self.lender._draft_cells, self.lender.loans
        assert room
        loans.check()
        self.draft_bytes.append(held_bytes(self.caches))
        self.counts.append(loans.n_loans)
        assert self.draft_bytes[-1] <= self.cells.bytes_for(room._dirty_cells[0])


def held_bytes(caches: Sequence[tuple[int, int]]) -> int:
    """What is written there: pages that this process alone maps. Those only looked at are the kernel's zeros."""
    n_pages = 0
    with open("/proc/self/pagemap", "rb") as pagemap:
        for start, length in caches:
            first, end = start // _libc.PAGE, -(-(start + length) // _libc.PAGE)
            found = np.frombuffer(os.pread(pagemap.fileno(), 8 * (end - first), 8 * first), np.uint64)
            n_pages += np.count_nonzero((found & (PRESENT | FROM_A_FILE | MAPPED_ONCE)) == (PRESENT | MAPPED_ONCE))
    return n_pages * _libc.PAGE


def drafter(name: str, folder: Path, quantisation: str, scale: int = 1) -> Path:
    """Return a draft model for the one called `name`: its guesses are often right, and its texts of any length."""
    path = make_model(name, folder, scale=scale, quantisation=quantisation)
    return changed(path, path.with_name(f"draft-{path.name}"), f"{name}.context_length", 131_072)


@contextmanager
def streamed(path: Path, draft: Path) -> Iterator[Engine]:
    """Under about the smallest budget in which the texts of these tests have room."""
    speculation_setup.WidthControl = Eager  # type: ignore[misc]
    count_peak_from_here()
    budget = 40 * MIB
    options = {**OPTIONS, "draft": draft, "speculate": "draft", "chunk_bytes": 128 * KIB, "backend": "edge-run"}
    while True:
        try:
            engine = Engine.open(path, ModelConfig(**options, memory=budget))
        except BudgetError as error:
            budget = error.minimum_bytes
            continue
        with closing(engine):
            if engine.decoder.capabilities.context_tokens >= LONGEST_TOKENS:
                assert engine.plan.mode == "streamed"
                yield engine
                return
        budget += MIB


def check_rows(path: Path, found: Talk, script: Callable[[Talk], None]) -> None:
    """Assert that `found` is what the model says without guesses, all of whose memory is there."""
    with closing(Engine.open(path, ModelConfig(**OPTIONS, backend="llama.cpp"))) as engine:
        wanted = Talk(engine)
        script(wanted)
    assert found.tokens == wanted.tokens
    assert all(np.array_equal(a, b) for a, b in zip(wanted.rows, found.rows, strict=True))
