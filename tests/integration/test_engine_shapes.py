"""The engine with odd shapes, exact budgets, and many engines: what streams equals llama.cpp's all the same.

Most tests run in a child process: a read of weights that are not resident ends it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from edge_run import BudgetError, KernelError, ModelConfig, ModelFileError
from edge_run.base.protocols import BatchToken, Logits
from edge_run.base.units import MIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from exactness import open_at
from in_child import in_child
from small_engines import (
    CHUNK_BYTES,
    OPTIONS,
    PROMPT,
    greedy,
    open_engine,
    plain_tokens,
    streaming_engine,
)
from tiny_models import make_model


def decode(engine: Engine, batch: Sequence[BatchToken]) -> Logits:
    return engine.decoder.decode(batch).copy()


def two_sequences(engine: Engine) -> list[Logits]:
    """Two conversations in one context: prompts of different lengths in one batch, then by token, then one cut."""
    both = [BatchToken(token, i, 0, i == 29) for i, token in enumerate(PROMPT[:30])]
    both += [BatchToken(token, i, 1, i == 9) for i, token in enumerate(PROMPT[10:20])]
    rows = [decode(engine, both)]
    for step in range(4):
        rows.append(decode(engine, [BatchToken(5, 30 + step, 0, True), BatchToken(6, 10 + step, 1, True)]))
    end = engine.decoder.rewind(1, 6)
    rows.append(decode(engine, [BatchToken(7, end + i, 1, True) for i in range(3)]))
    rows.append(decode(engine, [BatchToken(8, 34, 0, True)]))
    return rows


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mamba", "jamba"])
def test_two_sequences_in_one_batch(name: str, folder: Path) -> None:
    _two_sequences_in_one_batch(path=make_model(name, folder))


@in_child
def _two_sequences_in_one_batch(path: Path) -> None:
    with open_engine(path, backend="llama.cpp", sequences=2) as engine:
        wanted = two_sequences(engine)
    with streaming_engine(path, sequences=2) as engine:
        for _ in range(2):
            found = two_sequences(engine)
            assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))
            for sequence in (0, 1):
                engine.decoder.rewind(sequence, 0)


@in_child
def test_logits_of_all_batches_lie_in_the_same_memory(llama: Path) -> None:
    """But for those of more tokens than one pass may ask for."""
    with open_engine(llama, backend="llama.cpp", micro_batch_tokens=8, outputs_per_pass=8) as engine:

        def rows(n_rows: int) -> Logits:
            engine.decoder.rewind(0, 0)
            return engine.decoder.decode([BatchToken(token, i, 0, True) for i, token in enumerate(PROMPT[:n_rows])])

        first, second, third = rows(5).ctypes.data, rows(8).ctypes.data, rows(1).ctypes.data
        assert first == second == third
        one = np.array(rows(1))
        assert rows(20).shape == (20, one.shape[1])
        assert rows(3).ctypes.data == first
        assert np.allclose(rows(20)[0], one[0], atol=0.01)


def many_shapes(engine: Engine) -> list[Logits]:
    """Passes of many widths from 1 to 16 and back, with no logits, some, all."""
    rows, position = [], 0
    for width in [*range(1, 17, 3), *range(16, 0, -5)]:
        for wanted in (lambda i: False, lambda i: i % 2 == 0, lambda i: True):
            if position + width > 250:
                engine.decoder.rewind(0, 0)
                position = 0
            batch = [BatchToken(PROMPT[i], position + i, 0, wanted(i)) for i in range(width)]
            rows.append(decode(engine, batch))
            position += width
    return rows


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon-h1"])
def test_passes_of_any_width_and_any_logits(name: str, folder: Path) -> None:
    _passes_of_every_width(path=make_model(name, folder))


@in_child
def _passes_of_every_width(path: Path) -> None:
    with open_engine(path, backend="llama.cpp") as engine:
        wanted = many_shapes(engine)
    with streaming_engine(path) as engine:
        found = many_shapes(engine)
    assert [a.shape for a in wanted] == [b.shape for b in found]
    assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))


@in_child
def test_nothing_is_left_of_a_batch_that_does_not_fit(llama: Path) -> None:
    from edge_run import ContextFull

    (wanted,) = plain_tokens(llama, PROMPT)
    with streaming_engine(llama) as engine:
        session = Session(engine.decoder)
        with pytest.raises(ContextFull, match="256"):
            engine.decoder.decode([BatchToken(1, i, 0, i == 299) for i in range(300)])
        assert greedy(session, PROMPT) == wanted


def test_what_llama_cpp_refuses_is_a_kernel_error(llama: Path) -> None:
    with open_engine(llama) as engine:
        engine.decoder.decode([BatchToken(1, 0, 0, True)])
        with pytest.raises(KernelError, match="failed to decode"):
            engine.decoder.decode([BatchToken(1, 5, 0, True)])  # what comes between is not there


def test_more_sequences_than_tokens_in_a_pass(llama: Path) -> None:
    """llama.cpp asserts room for an output of each sequence."""
    _more_sequences_than_tokens(path=llama)


@in_child
def _more_sequences_than_tokens(path: Path) -> None:
    batch = [BatchToken(token, 0, sequence, True) for sequence, token in enumerate(PROMPT[:5])]
    with open_engine(path, backend="llama.cpp", sequences=5, micro_batch_tokens=1) as engine:
        wanted = decode(engine, batch)
    with streaming_engine(path, sequences=5, micro_batch_tokens=1) as engine:
        assert np.array_equal(decode(engine, batch), wanted)


# Plans and budgets


def test_every_byte_of_the_budget_has_a_line(folder: Path) -> None:
    for name in ("llama", "qwen3moe"):
        _every_byte_has_a_line(path=make_model(name, folder))


@in_child
def _every_byte_has_a_line(path: Path) -> None:
    for share in (0.0, 0.3, 8.0):
        engine = open_at(path, share, OPTIONS)
        plan = engine.plan
        assert sum(item.size_bytes for item in plan.items) <= plan.budget_bytes
        assert plan.minimum_bytes <= plan.budget_bytes
        sizes = {item.what: item.size_bytes for item in plan.items}
        assert (sizes["kv"], sizes["pinned"]) == (plan.kv_bytes, plan.pinned_bytes)
        assert sizes.get("window", 0) == plan.window_bytes
        engine.close()


def test_the_minimum_that_a_refusal_names_works(llama: Path) -> None:
    """In a process of its own each time, as a person would try it."""
    named = _refuse(llama)
    assert named > 40 * MIB
    _open_and_decode(path=llama, memory=named)


def _refuse(path: Path) -> int:
    with pytest.raises(BudgetError) as caught:
        Engine.open(path, ModelConfig(**OPTIONS, memory=20 * MIB, chunk_bytes=CHUNK_BYTES))
    return caught.value.minimum_bytes


@in_child
def _open_and_decode(path: Path, memory: int) -> None:
    # The parent holds more (pytest and what the tests made): a process of its own needs less.
    with open_engine(path, memory=memory) as engine:
        greedy(Session(engine.decoder), PROMPT)
        assert engine.memory_use.peak_bytes <= memory


@in_child
def test_engines_that_open_at_once_do_not_hear_each_other(folder: Path) -> None:
    """llama.cpp has one log, from which is read when to cut the stub, what takes memory, why a model is refused."""
    paths = [make_model(name, folder) for name in ("llama", "qwen3moe")]
    found: list[object] = []

    def open_some(path: Path) -> None:
        for _ in range(8):
            with open_engine(path) as engine:
                sizes = {item.what: item.size_bytes for item in engine.plan.items}
                found.append((path.name, engine.plan.kv_bytes, sizes["buffers"]))

    threads = [threading.Thread(target=open_some, args=(path,)) for path in paths * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 32, "an engine did not open"
    assert len(set(found)) == 2


# Nothing stays behind


def counts() -> tuple[int, int, int]:
    gc.collect()
    n_maps = Path("/proc/self/maps").read_text().count("\n")
    return threading.active_count(), len(os.listdir("/proc/self/fd")), n_maps


def assert_leaves_nothing(once: Callable[[], None], times: int) -> None:
    """Check that no descriptor, thread or mapping is left each time; the C library's arenas come once."""
    grown = []
    while len(grown) < 4:
        before = counts()
        for _ in range(times):
            once()
        after = counts()
        assert after[:2] == before[:2]
        grown.append(after[2] - before[2])
        if grown[-1] < 5:
            return
    raise AssertionError(f"mappings are left: {grown}")


@in_child
def test_engines_one_after_the_other_leave_nothing(llama: Path) -> None:
    def once() -> None:
        with streaming_engine(llama) as engine:
            greedy(Session(engine.decoder), PROMPT, 2)

    for _ in range(3):
        once()
    assert_leaves_nothing(once, times=5)


@in_child
def test_an_engine_that_does_not_open_leaves_nothing(llama: Path) -> None:
    broken = llama.with_name("broken.gguf")
    data = bytearray(llama.read_bytes())
    at = data.index(b"blk.0.attn_q.weight")
    data[at : at + 3] = b"xxx"
    broken.write_bytes(data)
    cache = llama.with_name("cache")

    def once() -> None:
        with pytest.raises(BudgetError):
            Engine.open(llama, ModelConfig(**OPTIONS, memory=20 * MIB, cache_folder=cache, chunk_bytes=CHUNK_BYTES))
        with pytest.raises(ModelFileError, match="cannot load it"):
            Engine.open(broken, ModelConfig(**OPTIONS, cache_folder=cache, chunk_bytes=CHUNK_BYTES))

    once()
    assert_leaves_nothing(once, times=10)
    assert not cache.exists()
