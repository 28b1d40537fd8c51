"""The engine under stress: failing reads, interrupts, forks, odd shapes. What streams equals llama.cpp's all the same.

Most tests run in a child process: a read of weights that are not resident ends it. Models are small, so chunks are too.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import BudgetError, Cancelled, KernelError, ModelConfig, ModelFileError, NotSupported, TierReadError
from edge_run.base.protocols import BatchToken, Logits
from edge_run.base.units import KIB, MIB
from edge_run.runtime import _ggml as ggml
from edge_run.runtime import engine as engine_module
from edge_run.runtime.engine import Engine
from edge_run.runtime.session import Session
from edge_run.tiers import _libc
from edge_run.tiers.source import SourceFile
from exactness import open_at
from in_child import in_child
from sabotage import sabotage
from tiny_models import N_VOCAB, make_model

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


def greedy(session: Session, prompt: Sequence[int], n_tokens: int = 8) -> list[int]:
    """The tokens that go on from `prompt`, each the most likely one."""
    logits, _ = session.feed(prompt)
    tokens = [int(logits.argmax())]
    while len(tokens) < n_tokens:
        tokens.append(int(session.step(tokens[-1]).argmax()))
    return tokens


def plain_tokens(path: Path, *prompts: Sequence[int], **options: Any) -> list[list[int]]:
    """What llama.cpp says with the same numerics key."""
    with open_engine(path, backend="llama.cpp", **options) as engine:
        session = Session(engine.decoder)
        return [greedy(session, prompt) for prompt in prompts]


@contextmanager
def open_engine(path: Path, **options: Any) -> Iterator[Engine]:
    engine = Engine(path, ModelConfig(**{**OPTIONS, **options}), CHUNK_BYTES)
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


# Failing reads


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_after_reads_that_fail_anywhere_the_tokens_are_right(name: str, folder: Path) -> None:
    """Also of state that cannot be cut (recurrent), and of a sliding window."""
    _after_reads_that_fail(path=make_model(name, folder))


@in_child
def _after_reads_that_fail(path: Path) -> None:
    wanted, wanted_other = plain_tokens(path, PROMPT, OTHER_PROMPT)
    saboteur = sabotage()
    n_errors = 0
    with streaming_engine(path) as engine:
        session = Session(engine.decoder)
        for fails_at, n_failures in ((0, 1), (40, 2), (400, 60), (1000, 60)):
            saboteur.set(fails_at, n_failures)
            try:
                greedy(session, PROMPT)
            except TierReadError:
                n_errors += 1
            saboteur.set(-(10**9))
            assert greedy(session, PROMPT) == wanted
            assert greedy(session, OTHER_PROMPT) == wanted_other
    assert n_errors >= 1, "too few reads failed where they were needed"


@in_child
def test_a_drive_that_is_gone_is_told_again_and_again_and_works_when_it_is_back(llama: Path) -> None:
    (wanted,) = plain_tokens(llama, PROMPT)
    saboteur = sabotage()
    with streaming_engine(llama) as engine:
        session = Session(engine.decoder)
        for _ in range(3):
            saboteur.set(0, n_failures=10**9)
            with pytest.raises(TierReadError, match="sabotage"):
                greedy(session, PROMPT)
        saboteur.set(-(10**9))
        assert greedy(session, PROMPT) == wanted


@in_child
def test_a_model_that_fits_and_whose_first_read_fails(llama: Path) -> None:
    (wanted,) = plain_tokens(llama, PROMPT)
    saboteur = sabotage()
    saboteur.set(2, n_failures=10**9)  # one that fails before anybody waits for it would be read again, unnoticed
    with open_engine(llama) as engine:
        assert engine.plan.mode == "resident"
        session = Session(engine.decoder)
        with pytest.raises(TierReadError, match="sabotage"):
            greedy(session, PROMPT)
        saboteur.set(-(10**9))
        for _ in range(4):  # readers that were already failing still tell it
            with suppress(TierReadError):
                assert greedy(session, PROMPT) == wanted
                return
    raise AssertionError("it never works again")


@in_child
def test_a_file_that_is_cut_is_told_and_works_when_it_is_whole_again(llama: Path) -> None:
    data, status = llama.read_bytes(), llama.stat()
    (wanted,) = plain_tokens(llama, PROMPT)
    with streaming_engine(llama) as engine:
        session = Session(engine.decoder)
        logits, _ = session.feed(PROMPT)
        os.truncate(llama, len(data) // 2)
        try:
            with pytest.raises(ModelFileError, match=llama.name):
                session.step(wanted[0])
        finally:
            llama.write_bytes(data)
            os.utime(llama, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert int(logits.argmax()) == wanted[0]
        assert greedy(session, PROMPT) == wanted


@in_child
def test_a_file_that_is_cut_in_the_middle_of_a_pass(llama: Path) -> None:
    """After the check at the start of a pass: the read itself finds out."""
    data = llama.read_bytes()
    with streaming_engine(llama) as engine:
        session = Session(engine.decoder)
        check, n_checks = SourceFile.check_unchanged, 0

        def check_and_cut(source: SourceFile) -> None:
            nonlocal n_checks
            check(source)
            n_checks += 1
            os.truncate(llama, len(data) // 2)

        SourceFile.check_unchanged = check_and_cut  # type: ignore[method-assign]
        try:
            with pytest.raises(ModelFileError, match="cut while in use"):
                session.feed(PROMPT)
        finally:
            llama.write_bytes(data)
        assert n_checks == 1


# Interrupts, cancelling and forks


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_ctrl_c_during_a_pass(name: str, folder: Path) -> None:
    _ctrl_c_during_a_pass(path=make_model(name, folder))


@in_child
def _ctrl_c_during_a_pass(path: Path) -> None:
    """At twelve moments; the next generation is right, and Python's own handler is back."""
    (wanted,) = plain_tokens(path, PROMPT)
    handler = signal.getsignal(signal.SIGINT)
    n_interrupts = 0
    with streaming_engine(path) as engine:
        session = Session(engine.decoder)
        started = time.monotonic()
        greedy(session, PROMPT)
        duration = time.monotonic() - started
        for moment in range(12):
            timer = threading.Timer(duration * moment / 12, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                session.feed([1])
                greedy(session, PROMPT)
                timer.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                n_interrupts += 1
            assert greedy(session, PROMPT) == wanted
        assert signal.getsignal(signal.SIGINT) is handler
    assert n_interrupts == 12


@in_child
def test_cancelling_from_another_thread(llama: Path) -> None:
    """At any moment: the pass ends with Cancelled, or was over by then; the tokens that follow are right."""
    (wanted,) = plain_tokens(llama, PROMPT)
    n_cancelled = 0
    with streaming_engine(llama) as engine:
        session = Session(engine.decoder)
        for moment in range(12):
            timer = threading.Timer(0.007 * moment, engine.decoder.cancel)
            timer.start()
            try:
                session.feed([2, moment])
                session.feed(PROMPT)
            except Cancelled:
                n_cancelled += 1
            timer.join()
            assert greedy(session, PROMPT) == wanted
    assert n_cancelled > 0


@in_child
def test_a_long_prompt_can_be_cancelled_where_no_callback_is_installed(llama: Path) -> None:
    """A model that fits is computed without one: then between two micro-batches."""
    with open_engine(llama, micro_batch_tokens=1) as engine:
        assert engine.plan.mode == "resident"
        session = Session(engine.decoder)
        session.feed(PROMPT)
        threading.Timer(0.05, engine.decoder.cancel).start()
        prompts = ([token, *PROMPT * 6] for token in itertools.cycle([1, 2]))
        with pytest.raises(Cancelled):
            list(map(session.feed, prompts))


@in_child
def test_a_fork_while_it_streams_harms_nobody(llama: Path) -> None:
    """Frames stay out of the child, which may do what forks are for: nothing of ours, and exit."""
    (wanted,) = plain_tokens(llama, PROMPT)
    with streaming_engine(llama) as engine:
        session = Session(engine.decoder)
        children: list[int] = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                time.sleep(0.05)
                os._exit(0)
            children.append(child)
            assert greedy(session, PROMPT) == wanted
            session.feed([1])
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        assert greedy(session, PROMPT) == wanted


# Where our own loader cannot run


@in_child
def test_buffered_reads_where_direct_ones_are_refused(llama: Path) -> None:
    (wanted,) = plain_tokens(llama, PROMPT)
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **options)

    os.open = refuse
    with streaming_engine(llama) as engine:
        assert engine.backend.name == "edge-run"
        assert "no direct reads" in engine.backend.reason
        assert greedy(Session(engine.decoder), PROMPT) == wanted


@in_child
def test_a_model_on_a_file_system_in_memory() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        path = make_model("llama", Path(shm))
        (wanted,) = plain_tokens(path, PROMPT)
        with streaming_engine(path) as engine:
            assert greedy(Session(engine.decoder), PROMPT) == wanted


def test_where_frames_cannot_be_moved_llama_cpp_runs_the_model_and_says_why(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wanted,) = plain_tokens(llama, PROMPT)

    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(_libc, "move_pages", refuse)
    with open_engine(llama) as engine:
        assert (engine.backend.name, engine.plan.mode) == ("llama.cpp", "llama.cpp")
        assert "does not move page frames" in engine.backend.reason
        assert greedy(Session(engine.decoder), PROMPT) == wanted
    with pytest.raises(NotSupported, match="does not move page frames"):
        Engine(llama, ModelConfig(**OPTIONS, backend="edge-run"))


def test_a_library_that_is_not_the_one_we_know(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "check_library", lambda: "its tensor struct has another size")
    with open_engine(llama) as engine:
        assert engine.backend == engine_module.Backend("llama.cpp", "its tensor struct has another size")


# Shapes


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
    with open_engine(llama) as engine, pytest.raises(KernelError, match="failed to decode"):
        engine.decoder.decode([BatchToken(1, 0, 5, True)])


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
        Engine(path, ModelConfig(**OPTIONS, memory=20 * MIB), CHUNK_BYTES)
    return int(str(caught.value.figures["minimum_bytes"]))


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


@in_child
def test_ten_engines_one_after_the_other_leave_nothing(llama: Path) -> None:
    def once() -> None:
        with streaming_engine(llama) as engine:
            greedy(Session(engine.decoder), PROMPT, 2)

    for _ in range(3):
        once()
    before = counts()
    for _ in range(10):
        once()
    after = counts()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 10


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
            Engine(llama, ModelConfig(**OPTIONS, memory=20 * MIB, cache_folder=cache), CHUNK_BYTES)
        with pytest.raises(ModelFileError, match="cannot load it"):
            Engine(broken, ModelConfig(**OPTIONS, cache_folder=cache), CHUNK_BYTES)

    once()
    before = counts()
    for _ in range(10):
        once()
    after = counts()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 10
    assert not cache.exists()
