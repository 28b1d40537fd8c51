"""An engine whose reads fail, or whose file changes: it is told, and what streams afterwards equals llama.cpp's.

Most tests run in a child process: a read of weights that are not resident ends it.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from edge_run import ModelConfig, ModelFileError, TierReadError
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine import engine as engine_module
from edge_run.runtime.engine import loading as loading_module
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama.model import LlamaContext
from edge_run.tiers.source import SourceFile
from in_child import in_child
from sabotage import sabotage
from small_engines import AFTERWARDS, OPTIONS, OTHER_PROMPT, PROMPT, greedy, open_engine, plain_tokens, streaming_engine
from tiny_models import make_model


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
