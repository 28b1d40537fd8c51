"""What a conversation leaves behind where nothing can be written for a while, and what is said of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_run.base.errors import Cancelled, ContextFull
from edge_run.base.protocols import BatchToken
from edge_run.runtime.keeping import keeper, search, writer
from edge_run.runtime.keeping.identity import KeptIdentity
from edge_run.runtime.keeping.keeper import PromptKeeper
from edge_run.runtime.keeping.store import PromptStore
from edge_run.tiers.kv.layout import KvLayout
from edge_run.tiers.kv.record import RowPass, block_names


class Conversation:
    """A model with a state of 64 bytes, whose answers are kept."""

    def __init__(self, folder: Path) -> None:
        self.state, self.said, self.folder = np.zeros(64, np.uint8), list[str](), folder
        layout = KvLayout([], ((self.state.ctypes.data, 64),))
        self.store = PromptStore(folder, KeptIdentity(bytes(16), {"library": "", "path": "", "file": ""}), 1 << 20)
        restorer: Any = None
        self.keeper = PromptKeeper(
            self.store, bytes(16), layout, restorer, width=64, has_passes=True, say=self.said.append
        )
        self.keeper.keeps_answers = True
        self.n_tokens = 0

    def answer(self, n_answers: int = 1) -> set[Path]:
        """Answer with a token each time; return which snapshots are kept then."""
        for _ in range(n_answers):
            self.keeper.ran([BatchToken(self.n_tokens, self.n_tokens)])
            self.n_tokens += 1
            self.keeper.finish()
        return set(self.folder.rglob("*.rows"))

    def later(self, seconds: float) -> None:
        self.keeper._writer._failed_s -= seconds


def fail(path: Path, head: object, copies: Iterable[bytes]) -> int:
    raise OSError(28, "No space left on device")


def test_what_was_not_written_pushes_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Conversation(tmp_path)
    kept = one.answer(3)
    assert len(kept) == 2
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_rows", fail)
        assert one.answer(4) == kept
    one.later(writer.REST_S)
    assert len(one.answer(1) & kept) == 1
    assert len(one.answer(4)) == 2


def test_a_failure_is_told_once_until_something_was_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Conversation(tmp_path)
    for n_told in (1, 2):
        one.answer()
        with monkeypatch.context() as patch:
            patch.setattr(writer, "write_rows", fail)
            for _ in range(3):
                one.answer()
                one.later(writer.REST_S)
        assert len(one.said) == n_told
    assert one.said[0] == f"prompt cache: No space left on device: nothing more is kept in {tmp_path} for now"


def test_a_failure_is_told_in_the_next_pass_whoever_is_answered_in_it(tmp_path: Path) -> None:
    """A server heard of none before it ended, where answers share passes: no `finish` comes then."""
    one = Conversation(tmp_path)
    one.keeper._writer.failure = "No space left on device"
    for _ in range(2):
        one.keeper.ran([BatchToken(0, 0, sequence=1)])
    assert len(one.said) == 1


def test_a_drive_that_hangs_at_a_lookup_is_gone_on_without_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network drive that is gone: the weights need not lie there, and passes go on."""
    one, answers, n_asked = Conversation(tmp_path), threading.Event(), 0
    one.answer()
    monkeypatch.setattr(keeper, "PATIENCE_S", 0.1)

    def hang(path: Path) -> bool:
        nonlocal n_asked
        n_asked += 1
        assert answers.wait(20)
        return False

    monkeypatch.setattr(search, "is_there", hang)
    try:
        for _ in range(2):
            assert one.keeper.resume(range(99), 1) is None
        assert n_asked == 1
        assert len(one.answer(2)) == 1, "nothing is written there meanwhile"
        assert one.said == [f"prompt cache: {tmp_path}: the drive does not answer; gone on without until it does"]
    finally:
        answers.set()
    assert one.keeper._drive._thread is not None
    assert one.keeper._drive._thread.has_ended.wait(20)
    assert not one.keeper._snapshots, "another prompt may be read by now"
    assert one.keeper.resume(range(9), 1) is None
    assert n_asked > 1
    assert len(one.answer()) == 2


def test_a_lookup_on_a_drive_that_hangs_can_be_cancelled(tmp_path: Path) -> None:
    answers = threading.Event()

    def check() -> None:
        raise Cancelled("the pass was cancelled")

    try:
        with pytest.raises(Cancelled):
            search.PatientDrive().ask(lambda: answers.wait(20), 60.0, check)
    finally:
        answers.set()


def test_a_cancelled_lookup_leaves_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that follows is cancelled too, and then the conversation is still there."""
    one, answers = Conversation(tmp_path), threading.Event()
    one.answer()
    expected: Any = object()
    one.keeper.expect(expected)

    def check() -> None:
        raise Cancelled("the pass was cancelled")

    def hang(path: Path) -> bool:
        return answers.wait(20)

    monkeypatch.setattr(search, "is_there", hang)
    monkeypatch.setattr(one.keeper, "_check", check)
    try:
        assert one.keeper.resume(range(9), 1) is None
        assert one.keeper._expected is expected, "it was not looked for"
    finally:
        answers.set()


def test_the_blocks_of_a_long_answer_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, n_named = Conversation(tmp_path), 0
    tokens, passes = range(2000), [RowPass(start, 1) for start in range(2000)]

    def named(*given: Any) -> list[bytes]:
        nonlocal n_named
        n_named += 1
        return block_names(*given)

    monkeypatch.setattr(search, "block_names", named)
    path = one.keeper._search.snapshot_path(tokens[:300], passes[:300])
    path.touch()
    n_named = 0
    found, _ = one.keeper._search.longest(tokens, passes, 1999)
    assert found is not None
    assert (found.position, found.passes, found.snapshot) == (300, passes[:300], path)
    assert n_named == 1


def test_a_drive_that_hangs_at_a_snapshot_is_gone_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, answers, late = Conversation(tmp_path), threading.Event(), list[bytes]()
    kept = one.answer()
    monkeypatch.setattr(keeper, "HANG_S", 0.1)

    def hang(path: Path, head: object, copies: Iterable[bytes]) -> int:
        assert answers.wait(20)
        late.extend(copies)
        return 0

    monkeypatch.setattr(writer, "write_rows", hang)
    try:
        assert one.answer(2) == kept
        assert one.said == [f"prompt cache: {tmp_path}: the drive does not answer; gone on without until it does"]
    finally:
        answers.set()
    assert one.keeper._drive._thread is not None
    assert one.keeper._drive._thread.has_ended.wait(20)
    assert not late, "the state is that of a later token by now"


def test_what_an_emptied_sequence_computes_is_not_kept_before_the_context_is_cleared(tmp_path: Path) -> None:
    """Its state may lie elsewhere than that of the first sequence of a new context, where it would be put back."""
    one = Conversation(tmp_path)
    kept = one.answer()
    one.keeper.cut(0, 0)
    one.n_tokens = 0
    assert one.answer(3) == kept
    one.keeper.cut(0, 0)
    one.keeper.cleared()
    one.n_tokens = 0
    assert len(one.answer(2) - kept) == 1


def test_no_state_is_kept_under_the_name_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one was, where the earlier one could not be written, and another text came beside it."""
    one = Conversation(tmp_path)
    one.keeper.resume(range(100), 1)
    assert one.keeper._snapshots == {64}
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_rows", fail)
        one.keeper.ran([BatchToken(token, token) for token in range(64)])
    one.later(writer.REST_S)
    one.keeper.ran([BatchToken(0, 64, sequence=1)])
    one.n_tokens = 64
    assert not one.answer()


@pytest.mark.parametrize(("width", "room"), [(8, 16), (64, 72), (65, 73)])
def test_a_conversation_is_gone_on_with_where_its_passes_have_room(tmp_path: Path, width: int, room: int) -> None:
    """A pass of guesses took cells for all of them: there was room in a longer context."""
    one, tokens = Conversation(tmp_path), list(range(10))
    passes = [RowPass(0, 8), RowPass(8, width)]
    path = one.keeper._search.snapshot_path(tokens, passes)
    path.touch()
    one.keeper.expect(keeper.ConversationRows(tokens, passes))
    for context_tokens in (room - 1, room):
        one.keeper._restorer = SimpleNamespace(context_tokens=context_tokens)  # type: ignore[assignment]
        found, _ = one.keeper._longest([*tokens, 10])
        if context_tokens < room or width > 64:  # of tokens in a pass
            assert found is None
        else:
            assert found is not None
            assert (found.position, found.snapshot) == (10, path)


def test_rows_that_have_no_room_are_computed_again(tmp_path: Path) -> None:
    class Full:
        def restore(self, prefix: object, tokens: object) -> tuple[int, str]:
            raise ContextFull("the context is full")

    one, tokens = Conversation(tmp_path), list(range(10))
    one.keeper._restorer = Full()  # type: ignore[assignment]
    one.keeper._search.snapshot_path(tokens[:9], [RowPass(0, 10)]).touch()
    assert one.keeper.resume(tokens, 1) == 0
    assert not one.keeper._is_off
    assert not one.said
