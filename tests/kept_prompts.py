"""Texts in engines with a prompt cache, and without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_run.base.config import ModelConfig
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.keeping.keeper import PromptKeeper
from edge_run.runtime.keeping.opening import open_keeper
from exactness import open_at
from tiny_models import N_VOCAB

WIDTH = 64
OPTIONS: dict[str, Any] = {
    "context_tokens": 1024,
    "micro_batch_tokens": WIDTH,
    "outputs_per_pass": 2,
    "threads": 1,
    "check_file": False,
}
OURS: dict[str, Any] = {"backend": "edge-run"}
TOKENS = np.random.default_rng(0).integers(1, N_VOCAB, 1000).tolist()


@contextmanager
def opened(path: Path, folder: Path | None, **options: Any) -> Iterator[tuple[Session, PromptKeeper | None, list[str]]]:
    """A session of a model, with a prompt cache in `folder`; share: streamed with so much above the smallest budget."""
    share = options.pop("share", None)
    settings = {**OPTIONS, **options, "prompt_cache": folder or "off"}
    is_streamed = share is not None
    engine = open_at(path, share, settings) if is_streamed else Engine.open(path, ModelConfig(**settings, **OURS))
    said: list[str] = []
    try:
        keeper = open_keeper(engine, said.append)
        assert (keeper is not None) == (folder is not None), said
        session = open_session(engine)
        session.keeper = keeper
        yield session, keeper, said
        if keeper:
            keeper.close()
    finally:
        engine.close()


def talk(session: Session, prompt: Sequence[int], n_tokens: int = 5) -> tuple[list[np.ndarray], int]:
    """The logits after `prompt` and after tokens that follow, and how many tokens were there."""
    logits, cached = session.feed(prompt)
    rows = [logits.copy()]
    rows += [session.step(token).copy() for token in TOKENS[900 : 900 + n_tokens]]
    session.finish()
    return rows, cached


def talks(path: Path, folder: Path | None, *prompts: Sequence[int], **options: Any) -> list[tuple[Any, int]]:
    """Each prompt in an engine of its own, or, without a cache, in an empty context, where one prompt is read once."""
    if folder is None:
        known: dict[tuple[int, ...], tuple[Any, int]] = {}
        with opened(path, None, **options) as (session, _, _):
            for prompt in map(tuple, prompts):
                if prompt not in known:
                    session._cut(0)
                    known[prompt] = talk(session, prompt)
        return [known[tuple(prompt)] for prompt in prompts]
    found = []
    for prompt in prompts:
        with opened(path, folder, **options) as (session, _, said):
            found.append(talk(session, prompt))
            assert not said
    return found


def same(found: tuple[Any, int], wanted: tuple[Any, int]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
