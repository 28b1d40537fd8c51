"""The engine under stress: failing reads, interrupts, forks. What streams equals llama.cpp's all the same.

Most tests run in a child process: a read of weights that are not resident ends it.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edge_run import Cancelled, ModelConfig, ModelFileError, NotSupported, TierReadError
from edge_run.base.protocols import BatchToken
from edge_run.base.results import Backend
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine import engine as engine_module
from edge_run.runtime.engine import loading as loading_module
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.keeping.opening import open_keeper
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.model import LlamaContext
from edge_run.tiers import _libc
from edge_run.tiers.source import SourceFile
from in_child import in_child
from sabotage import sabotage
from small_engines import (
    OPTIONS,
    OTHER_PROMPT,
    PROMPT,
    greedy,
    open_engine,
    plain_tokens,
    streaming_engine,
)
from tiny_models import make_model

AFTERWARDS = 4  # tokens that are compared after each disturbance: what went wrong shows in the first

# Failing reads


def test_a_file_that_changes_while_it_is_read_whole_is_told(tmp_path: Path) -> None:
    """What was read is part old, part new: nothing is computed with it, the next time either."""
    _changes_while_it_is_read(path=make_model("llama", tmp_path))


@in_child
def _changes_while_it_is_read(path: Path) -> None:
    read, check = SourceFile.read_pieces, SourceFile.check_unchanged
    was_checked = threading.Event()

    def read_late(source: SourceFile, *where: Any) -> int:
        was_checked.wait(60)
        n_bytes = read(source, *where)
        os.utime(path)
        return n_bytes

    def check_first(source: SourceFile) -> None:
        check(source)
        was_checked.set()

    with (
        mock.patch.object(SourceFile, "read_pieces", read_late),
        mock.patch.object(SourceFile, "check_unchanged", check_first),
        open_engine(path, page_cache="off") as engine,
    ):
        assert engine.plan.mode == "resident"
        for _ in range(2):
            with pytest.raises(ModelFileError, match="changed while it was in use"):
                Session(engine.decoder).feed(PROMPT)


def test_a_file_that_changes_in_the_middle_of_a_pass_is_told_before_its_token_is(folder: Path) -> None:
    _changes_in_a_pass(path=make_model("llama", folder))


@in_child
def _changes_in_a_pass(path: Path) -> None:
    with streaming_engine(path) as engine:
        session = Session(engine.decoder)
        token = int(session.feed(PROMPT)[0].argmax())
        decode, n_before = LlamaContext.decode, len(session.history)

        def changing(context: LlamaContext, batch: Any) -> int:
            code = decode(context, batch)
            os.utime(path)
            return code

        with (
            mock.patch.object(LlamaContext, "decode", changing),
            pytest.raises(ModelFileError, match="changed while it was in use"),
        ):
            session.step(token)
        assert len(session.history) == n_before


@pytest.mark.parametrize("when", ["planned", "loaded"])
def test_a_file_that_is_replaced_while_the_model_opens_is_told(tmp_path: Path, when: str) -> None:
    """Else weights would be read from where the old header says that they lie."""
    path, other = make_model("llama", tmp_path), make_model("llama", tmp_path, seed=1)
    of, name = (engine_module, "prepare") if when == "planned" else (loading_module, "load_stubs")
    real = getattr(of, name)

    def replace_first(*given: Any) -> Any:
        other.replace(path)
        return real(*given)

    with mock.patch.object(of, name, replace_first), pytest.raises(ModelFileError, match="changed while it was in use"):
        Engine.open(path, ModelConfig(**OPTIONS))


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
        for fails_at, n_failures in ((0, 1), (20, 2), (200, 30), (500, 30), (20, 300)):
            saboteur.set(fails_at, n_failures)
            try:
                greedy(session, PROMPT)
            except TierReadError:
                n_errors += 1
            saboteur.set(-(10**9))
            assert greedy(session, PROMPT, AFTERWARDS) == wanted[:AFTERWARDS]
            assert greedy(session, OTHER_PROMPT, AFTERWARDS) == wanted_other[:AFTERWARDS]
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
    with open_engine(llama, page_cache="off") as engine:  # which may hold all of it, so that nothing is read
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
            assert greedy(session, PROMPT, AFTERWARDS) == wanted[:AFTERWARDS]
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
            timer = threading.Timer(0.007 * moment, engine.interrupt.cancel)
            timer.start()
            try:
                session.feed([2, moment])
                session.feed(PROMPT)
            except Cancelled:
                n_cancelled += 1
            timer.join()
            engine.interrupt.reset()  # which it was too late for, perhaps
            assert greedy(session, PROMPT, AFTERWARDS) == wanted[:AFTERWARDS]
    assert n_cancelled > 0


@in_child
def test_a_long_prompt_can_be_cancelled_where_no_callback_is_installed(llama: Path) -> None:
    """A model that fits is computed without one: then between two micro-batches."""
    with open_engine(llama, micro_batch_tokens=1) as engine:
        assert engine.plan.mode == "resident"
        session = Session(engine.decoder)
        session.feed(PROMPT)
        threading.Timer(0.05, engine.interrupt.cancel).start()
        prompts = ([token, *PROMPT * 6] for token in itertools.cycle([1, 2]))
        with pytest.raises(Cancelled):
            list(map(session.feed, prompts))


@in_child
def test_a_pass_that_is_stopped_after_one_that_failed(llama: Path) -> None:
    """The failed one leaves nodes out of the graph, which llama.cpp uses again; the stopped one ends before them."""
    with streaming_engine(llama) as engine:
        decoder, driver, settle = engine.decoder, engine._loaded.driver, ggml.settle

        def decode() -> np.ndarray:
            return decoder.decode([BatchToken(token, i, 0, True) for i, token in enumerate(PROMPT[:16])]).copy()

        wanted = decode()
        for failing in (3, 20, 60):
            decoder.rewind(0, 0)
            asked = itertools.count()

            def fail(*node: Any, asked: Iterator[int] = asked, failing: int = failing) -> bool:
                if next(asked) == failing:
                    raise Cancelled("here")
                return settle(*node)

            with mock.patch.object(ggml, "settle", fail), pytest.raises(Cancelled):
                decode()
            driver.stop.set(True)
            with pytest.raises(Cancelled):
                decode()
            assert np.array_equal(decode(), wanted)


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
        Engine.open(llama, ModelConfig(**OPTIONS, backend="edge-run"))


def unreadable(*_: object) -> None:
    raise AssertionError("what is at an address is not known")


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> str:
    """A llama.cpp whose structs differ, so that nothing of ours may read or write them."""
    reason = "its tensor struct has another size"
    monkeypatch.setattr(ggml, "check_library", lambda: reason)
    monkeypatch.setattr(ggml, "tensor_at", unreadable)
    return reason


def test_a_library_that_is_not_the_one_we_know(llama: Path, unknown: str, tmp_path: Path) -> None:
    """A chat asks for a prompt cache, for which passes would be looked at."""
    with open_engine(llama, prompt_cache=tmp_path) as engine:
        assert engine.backend == Backend("llama.cpp", unknown)
        said = list[str]()
        assert open_keeper(engine, said.append) is None
        assert said == [f"prompt cache: off: llama.cpp's own loader runs this model ({unknown})"]
        assert len(greedy(Session(engine.decoder), PROMPT)) > 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"exact": True}, "--exact: not with this llama.cpp: its tensor struct"),
        ({"draft": Path("none.gguf")}, "a draft model .*: not with this llama.cpp: its tensor struct"),
        ({"kv_keep": 64}, "--kv-keep: llama.cpp's own loader runs the model: its tensor struct.*leave out --kv-keep"),
        ({"kv_spill": "on"}, "--kv-spill: llama.cpp's own loader runs the model"),
    ],
)
def test_what_only_our_loader_does_is_refused(options: dict[str, Any], what: str, llama: Path, unknown: str) -> None:
    with pytest.raises(NotSupported, match=what):
        Engine.open(llama, ModelConfig(**{**OPTIONS, **options}))


def test_without_a_prompt_cache_no_pass_is_looked_at(llama: Path, tmp_path: Path) -> None:
    with open_engine(llama, backend="llama.cpp", prompt_cache=tmp_path) as engine:
        assert not hasattr(engine._loaded.context, "_callback")
