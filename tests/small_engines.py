"""Engines of small models in small chunks, for tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_run import ModelConfig
from edge_run.base.units import KIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from exactness import open_at
from kept_tokens import kept
from tiny_models import N_VOCAB

OPTIONS: dict[str, Any] = {
    "context_tokens": 256,
    "micro_batch_tokens": 16,
    "outputs_per_pass": 16,
    "threads": 1,
    "check_file": False,
}
CHUNK_BYTES = 16 * KIB
PROMPT = np.random.default_rng(0).integers(1, N_VOCAB, 40).tolist()
OTHER_PROMPT = PROMPT[:25] + PROMPT[:10]
AFTERWARDS = 4  # tokens that are compared after each disturbance: what went wrong shows in the first


def greedy(session: Session, prompt: Sequence[int], n_tokens: int = 8) -> list[int]:
    """The tokens that go on from `prompt`, each the most likely one."""
    logits, _ = session.feed(prompt)
    tokens = [int(logits.argmax())]
    while len(tokens) < n_tokens:
        tokens.append(int(session.step(tokens[-1]).argmax()))
    return tokens


def plain_tokens(path: Path, *prompts: Sequence[int], **options: Any) -> list[list[int]]:
    """What llama.cpp says with the same numerics key."""

    def compute() -> list[list[int]]:
        with open_engine(path, backend="llama.cpp", **options) as engine:
            session = Session(engine.decoder)
            return [greedy(session, prompt) for prompt in prompts]

    return kept(path, (OPTIONS, options, prompts), compute)


@contextmanager
def open_engine(path: Path, **options: Any) -> Iterator[Engine]:
    engine = Engine.open(path, ModelConfig(**{**OPTIONS, **options}, chunk_bytes=CHUNK_BYTES))
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def streaming_engine(path: Path, **options: Any) -> Iterator[Engine]:
    """An engine that streams, just above the smallest budget."""
    engine = open_at(path, 0.0, {**OPTIONS, **options})
    try:
        yield engine
    finally:
        engine.close()
