"""Files of conversations: what was said comes back, and nothing else is taken for it."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.base.errors import ConfigError, TierReadError
from edge_run.devices.host import locks
from edge_run.runtime.keeping import conversations
from edge_run.runtime.keeping.conversations import Conversation, Conversations
from edge_run.runtime.keeping.store import erase
from edge_run.tiers.kv.record import RowPass

PARTS = (("system", "Be kind."), ("user", "Hi\n\x1b[2J"), ("assistant", "Hello \U0001f98a"))
PASSES = (RowPass(0, 64), RowPass(64, 30), *(RowPass(94 + i, 1) for i in range(100)), RowPass(194, 8))


def test_a_conversation_comes_back_as_it_was(tmp_path: Path) -> None:
    kept = Conversations(tmp_path)
    for name, passes in (("fox", PASSES), ("exact.1", None)):
        one = Conversation(name, "/models/model.gguf", PARTS, tuple(range(197)), passes)
        kept.save(one)
        found = kept.load(name)
        assert found.parts == PARTS
        assert (tuple(found.tokens), found.model) == (one.tokens, one.model)
        assert (None if found.passes is None else tuple(found.passes)) == passes
    (file,) = tmp_path.rglob("fox.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert len(json.loads(file.read_text())["passes"]) == 4, "a hundred single tokens are one run"
    assert {name for name, _ in kept.names()} == {"fox", "exact.1"}
    assert kept.latest().name == "exact.1"
    assert kept.remove("fox")
    assert not kept.remove("fox")
    with pytest.raises(ConfigError, match="no such conversation"):
        kept.load("fox")


@pytest.mark.parametrize("name", ["", ".", "..", "../fox", "a/b", ".hidden", "x" * 65, "a b", "fox\n"])
def test_a_name_never_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    kept = Conversations(tmp_path)
    for action in (kept.load, kept.remove, lambda name: kept.save(Conversation(name, "", ()))):
        with pytest.raises(ConfigError, match="give a name"):
            action(name)
    assert not list(tmp_path.rglob("*.json"))


def test_a_model_whose_name_no_file_can_have_is_damage(tmp_path: Path) -> None:
    kept = Conversations(tmp_path)
    kept.save(Conversation("fox", "odd\0", PARTS))
    with pytest.raises(ConfigError, match="is damaged"):
        kept.load("fox")


def test_a_small_file_does_not_become_many_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, made = Conversations(tmp_path), list[RowPass]()
    kept.save(Conversation("fox", "m", PARTS, tuple(range(1000)), [RowPass(0, 1000)]))
    (file,) = tmp_path.rglob("fox.json")
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "passes": [(1000 * i, 1, 1000) for i in range(200)]}))

    def make(start: int, width: int) -> RowPass:
        made.append(RowPass(start, width))
        return made[-1]

    monkeypatch.setattr(conversations, "RowPass", make)
    with pytest.raises(ConfigError, match="is damaged"):
        kept.load("fox")
    assert len(made) <= 2000


_WILD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Conversations, Path, str]:
    """Conversations with one that was saved, its file, and what was in that."""
    folder = tmp_path_factory.mktemp("saved")
    kept = Conversations(folder)
    kept.save(Conversation("fox", "m", PARTS, tuple(range(197)), PASSES))
    (file,) = folder.rglob("fox.json")
    return kept, file, file.read_text()


@given(st.sampled_from(["format", "model", "parts", "tokens", "passes"]), _WILD, st.data())
def test_whatever_a_file_says_is_checked(
    saved: tuple[Conversations, Path, str], field: str, wild: Any, data: st.DataObject
) -> None:
    kept, file, text = saved
    fields = json.loads(text)
    if field in ("tokens", "passes") and data.draw(st.booleans()):
        fields[field][data.draw(st.integers(0, len(fields[field]) - 1))] = wild
    else:
        fields[field] = wild
    file.write_text(json.dumps(fields))
    found = None
    with contextlib.suppress(ConfigError):
        found = kept.load("fox")
    if found is None:
        return  # it was refused, in one line
    assert all(type(token) is int and 0 <= token < 2**31 for token in found.tokens)
    assert all(isinstance(word, str) for part in found.parts for word in part)
    ends = [one.start + one.width for one in found.passes or ()]
    assert all(0 <= one.start <= end for one, end in zip(found.passes or (), [0, *ends], strict=False))
    assert not ends or ends[-1] >= len(found.tokens)


def test_a_file_that_is_cut_is_said_to_be_damaged(tmp_path: Path) -> None:
    kept = Conversations(tmp_path)
    kept.save(Conversation("fox", "m", PARTS, (1, 2), (RowPass(0, 2),)))
    (file,) = tmp_path.rglob("fox.json")
    content = file.read_bytes()
    for size in (0, 1, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="damaged"):
            kept.load("fox")


def test_what_was_left_of_one_that_was_being_saved_is_erased_too(tmp_path: Path) -> None:
    kept = Conversations(tmp_path)
    for name in "ab":
        kept.save(Conversation(name, "model.gguf", (("user", "a secret"),)))
    (tmp_path / "conversations" / ".a.json.1-0123abcd-01234567.part").write_text("a secret")
    assert kept.erase() == 2
    assert [path.name for path in (tmp_path / "conversations").iterdir()] == [".lock"]
    assert kept.erase() == 0
    assert Conversations(tmp_path / "none").erase() == 0


def test_what_other_programs_have_in_the_folder_is_not_erased(tmp_path: Path) -> None:
    """As where --prompt-cache names the folder of a project, which has conversations of its own."""
    kept, folder = Conversations(tmp_path), tmp_path / "conversations"
    for name in ("ours", "damaged"):
        kept.save(Conversation(name, "model.gguf", (("user", "a secret"),)))
    damaged = folder / "damaged.json"
    damaged.write_bytes(damaged.read_bytes()[:40])
    theirs = {"theirs.json": '{"messages": []}', "no name!.json": "{}", "empty.json": "", ".notes.part": "half a note"}
    for name, text in theirs.items():
        (folder / name).write_text(text)
    (folder / "folder.json").mkdir()
    assert kept.erase() == 2
    assert {path.name: path.read_text() for path in folder.iterdir() if path.is_file()} == {**theirs, ".lock": ""}
    assert (folder / "folder.json").is_dir()


def test_a_conversation_is_held_by_one_chat_at_a_time(tmp_path: Path) -> None:
    kept = Conversations(tmp_path)
    hold = kept.hold("fox")
    assert hold
    with pytest.raises(ConfigError, match="fox: another chat goes on with it"):
        Conversations(tmp_path).hold("fox")
    other = kept.hold("fo")
    assert other
    hold.remove()
    again = kept.hold("fox")
    assert again
    for one in (other, again):
        one.remove()
    kept.erase()
    assert [path.name for path in (tmp_path / "conversations").iterdir()] == [".lock"]
    with pytest.raises(ConfigError, match="give a name"):
        kept.hold("a/b")
    (tmp_path / "file").touch()
    with pytest.raises(TierReadError, match="conversations cannot be kept"):
        Conversations(tmp_path / "file").hold("fox")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_locks_a_chat_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*given: object) -> None:
        raise OSError(code, "No locks")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    assert Conversations(tmp_path).hold("fox") is None


def test_rows_that_cannot_be_erased_are_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stays, goes = tmp_path / ("a" * 32), tmp_path / ("b" * 32)
    for folder in (stays, goes):
        folder.mkdir()
        (folder / "000000-00.rows").write_bytes(b"x" * 7)
    rmtree = shutil.rmtree

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if path != stays:
            rmtree(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(TierReadError, match=f"{stays}: cannot be removed .Permission denied"):
        erase(tmp_path)
    assert not goes.exists()
    monkeypatch.undo()
    assert erase(tmp_path) == 7
    assert list(tmp_path.iterdir()) == []


def test_a_drive_that_is_unmounted_is_not_made_up_for(tmp_path: Path) -> None:
    kept = Conversations(tmp_path / "prompts")
    kept.save(Conversation("fox", "m", PARTS))
    shutil.rmtree(tmp_path / "prompts")
    with pytest.raises(TierReadError, match=r"the conversation cannot be kept .No such file or directory"):
        kept.save(Conversation("fox", "m", PARTS))
    with pytest.raises(TierReadError, match="conversations cannot be kept"):
        kept.hold("hen")
    assert not list(tmp_path.iterdir())
