"""What tests say to decoders, the same to each: texts that grow, are cut, cleared and guessed at, and branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.engine.engine import Engine
from tiny_models import N_VOCAB

WIDTH, VERIFIED, SEQUENCES = 64, 6, 4
OPTIONS: dict[str, Any] = {
    "context_tokens": 8192,
    "micro_batch_tokens": WIDTH,
    "outputs_per_pass": VERIFIED,
    "threads": 1,
    "check_file": False,
}
TEXT = np.random.default_rng(0).integers(1, N_VOCAB, 8192).tolist()


@dataclass
class Talk:
    """Says the same to any decoder. rows: the logits of all that was asked for; position: the end of the text."""

    decoder: LocalDecoder
    after_pass: Callable[[], None] = lambda: None
    rows: list[np.ndarray] = field(default_factory=list)
    position: int = 0

    def token(
        self, position: int, sequence: int = 0, wants_logits: bool = True, branches: Sequence[int] = ()
    ) -> BatchToken:
        return BatchToken(
            TEXT[(position + 31 * sequence) % len(TEXT)], position, sequence, wants_logits, tuple(branches)
        )

    def decode(self, batch: Sequence[BatchToken]) -> None:
        self.rows.append(self.decoder.decode(batch).copy())
        self.after_pass()

    def prompt(self, n_tokens: int) -> None:
        stop = self.position + n_tokens
        while self.position < stop:
            part = range(self.position, min(self.position + WIDTH, stop))
            self.decode([self.token(i, wants_logits=i == part[-1]) for i in part])
            self.position = part.stop

    def step(self, n_tokens: int = 1) -> None:
        for _ in range(n_tokens):
            self.decode([self.token(self.position)])
            self.position += 1

    def verify(self, n_tokens: int, n_true: int) -> None:
        """Verify guesses in a row, of which some come true."""
        self.decode([self.token(self.position + i) for i in range(n_tokens)])
        self.rewind(self.position + n_true)

    def verify_tree(self, chosen: int, n_true: int) -> None:
        """Verify a token, and guesses in three sequences after it; the text goes on in one of them."""
        start, others = self.position, range(1, SEQUENCES - 1)
        self.decoder.branch(0, others)
        tree = [self.token(start + 1 + i // 3, i % 3) for i in range(VERIFIED - 1)]
        self.decode([self.token(start, branches=others), *tree])
        self.decoder.keep(0, start, chosen, others)
        self.rewind(start + n_true)

    def rewind(self, position: int) -> None:
        self.position = self.decoder.rewind(0, position)
        self.rows.append(np.array([self.position]))

    def clear(self) -> None:
        self.decoder.clear()
        self.position = 0


def say(talk: Talk) -> None:
    """A text that grows, shrinks and begins anew."""
    talk.prompt(200)
    talk.step(3)
    talk.verify(5, 2)
    talk.step(2)
    talk.prompt(300)
    talk.step(2)
    talk.rewind(150)
    talk.step(2)
    talk.prompt(130)
    talk.verify(6, 0)
    talk.step(1)
    talk.clear()
    talk.step(2)
    talk.prompt(64)
    talk.step(1)


def say_in_branches(talk: Talk) -> None:
    """A text, guesses in trees, and another sequence beside it, which is then all that is left."""
    talk.prompt(150)
    for chosen, n_true in ((0, 1), (2, 2), (1, 3), (2, 1)):
        talk.verify_tree(chosen, n_true)
        talk.step(1)
    talk.prompt(100)
    talk.verify_tree(1, 2)
    talk.rewind(90)
    talk.verify_tree(2, 3)
    talk.step(2)
    for start in (0, 40):
        talk.decode([talk.token(i, 3, wants_logits=i == start + 39) for i in range(start, start + 40)])
    talk.rewind(0)
    for i in range(80, 84):
        talk.decode([talk.token(i, 3)])
    talk.decoder.rewind(3, 10)
    talk.decode([talk.token(10, 3)])
    talk.clear()
    talk.prompt(70)


def check_rows(path: Path, script: Callable[[Talk], None], settings: dict[str, Any], found: Talk) -> None:
    """Assert that `found` is what llama.cpp says, all of whose memory is there."""
    plain = Engine.open(path, ModelConfig(**settings, backend="llama.cpp"))
    wanted = Talk(plain.decoder)
    script(wanted)
    assert all(np.isfinite(rows).all() for rows in wanted.rows)
    different = [i for i, (a, b) in enumerate(zip(wanted.rows, found.rows, strict=True)) if not np.array_equal(a, b)]
    assert not different
    plain.close()
