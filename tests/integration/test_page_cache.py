"""A model that fits, run again: what the first run read is there, if there is room, and the logits are the same."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ModelFileError
from edge_run.base.units import GIB, MIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine import caching
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama.model import LlamaContext
from exactness import open_at, run
from in_child import in_child
from tiny_models import make_model

OPTIONS: dict[str, object] = {"context_tokens": 256, "micro_batch_tokens": 32, "threads": 1, "outputs_per_pass": 32}
TOKENS = [(7 * i) % 250 + 3 for i in range(40)]


def run_cold(path: Path, **options: object) -> tuple[np.ndarray, float]:
    """Return the logits of a run of a file that is not in memory, and the share of it that the next run finds there."""
    descriptor = os.open(path, os.O_RDWR)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    logits, _ = run_once(path, **options)
    return logits, run_once(path)[1]


def run_once(path: Path, **options: object) -> tuple[np.ndarray, float]:
    """Return the logits of a run, and the share of what it read that it found in the page cache."""
    engine = Engine.open(path, ModelConfig(**{"memory": GIB, **OPTIONS, **options}))
    assert engine.plan.mode == "resident"
    logits = np.concatenate([np.atleast_2d(rows) for rows in run(engine, TOKENS, 36)])
    for copier in (thread for thread in threading.enumerate() if thread.name == "edge-run-copier"):
        copier.join()  # what was in the page cache is copied in the background
    totals = engine.read_totals
    engine.decoder.rewind(0, 0)
    again = np.concatenate([np.atleast_2d(rows) for rows in run(engine, TOKENS, 36)])
    assert np.array_equal(logits, again), "from memory of its own"
    engine.close()
    return logits, totals.cached_bytes / totals.bytes_read


@in_child
def test_what_a_run_read_is_there_for_the_next(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    for _ in range(4):
        logits, kept = run_cold(path)
        if not 0 < kept < 1:  # somebody empties the page cache of the whole machine
            break
    if not kept:
        pytest.skip("no file stays in the page cache here, or the kernel does not say so")
    assert kept == 1
    again, found = run_once(path, page_cache="off")
    assert found == 0
    assert np.array_equal(logits, again)


@in_child
def test_nothing_stays_where_it_is_not_wanted_and_where_memory_is_short(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    assert run_cold(path, page_cache="off")[1] < 0.5, "but the header"
    available = caching.available_bytes
    caching.available_bytes = lambda **_: 300 * MIB  # type: ignore[assignment]
    try:
        assert run_cold(path)[1] < 0.5
    finally:
        caching.available_bytes = available


@in_child
def test_what_streams_never_uses_it(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    path.read_bytes()
    engine = open_at(path, 0.3, dict(OPTIONS))
    run(engine, TOKENS, 36)
    assert engine.read_totals.bytes_read > 0
    assert engine.read_totals.cached_bytes == 0
    engine.close()


@in_child
def test_a_file_that_changes_in_the_first_pass_is_told_before_its_token_is(tmp_path: Path) -> None:
    """That pass computes on the kernel's own pages, and gave the logits of other weights."""
    path, decode = make_model("llama", tmp_path), LlamaContext.decode
    path.read_bytes()
    engine = Engine.open(path, ModelConfig(memory=GIB, **OPTIONS))
    assert engine.plan.mode == "resident"
    if not engine._passes._supply()._cached.mapped:  # type: ignore[union-attr]
        pytest.skip("no file stays in the page cache here, or the kernel does not say so")
    session = Session(engine.decoder)

    def change_first(context: LlamaContext, batch: Any) -> int:
        os.utime(path)
        return decode(context, batch)

    with (
        mock.patch.object(LlamaContext, "decode", change_first),
        pytest.raises(ModelFileError, match="changed while it was in use"),
    ):
        session.feed(TOKENS)
    assert not session.history
    engine.close()
