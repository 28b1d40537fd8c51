"""What was found out comes back as long as it is of the same file, and nothing that is not understood does."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.files.identity import file_facts
from edge_run.runtime.probing.kept_findings import MOST_FINDINGS, KeptFindings


@pytest.fixture
def gguf(tmp_path: Path) -> Any:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return SimpleNamespace(shards=[SimpleNamespace(path=path)])


def read(gguf: Any, folder: Path) -> int:
    return KeptFindings.of_model(folder / "width", gguf).read(lambda found: int(found["width"])) or 0


def test_it_is_of_a_file_until_that_is_edited(gguf: Any, tmp_path: Path) -> None:
    assert read(gguf, tmp_path) == 0
    KeptFindings.of_model(tmp_path / "width", gguf).write({"width": 7})
    assert read(gguf, tmp_path) == 7
    path = gguf.shards[0].path
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(b"edit")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(gguf, tmp_path) == 0, "also where its time is set back"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"{}", b'{"width": "x"}', b'{"width": null}', b"\xff"])
def test_what_is_not_understood_is_nothing(gguf: Any, tmp_path: Path, content: bytes) -> None:
    KeptFindings.of_model(tmp_path / "width", gguf).write({"width": 7})
    (place,) = (tmp_path / "width").iterdir()
    place.write_bytes(content)
    assert read(gguf, tmp_path) == 0


def test_nothing_is_kept_of_a_file_that_is_gone(gguf: Any, tmp_path: Path) -> None:
    gguf.shards[0].path.unlink()
    KeptFindings.of_model(tmp_path / "width", gguf).write({"width": 7})
    assert read(gguf, tmp_path) == 0
    assert not list(tmp_path.iterdir())


def test_the_beginning_of_a_file_counts_where_it_is_asked_for(tmp_path: Path) -> None:
    for name, content in (("a", b"12"), ("b", b"13")):
        (tmp_path / name).write_bytes(content)
    starts = [[file_facts(tmp_path / name, hashed_bytes=n).start for name in "ab"] for n in (0, 1, 2)]
    assert [a == b for a, b in starts] == [True, True, False]
    assert starts[0] == ["", ""]


def test_the_latest_are_kept(tmp_path: Path) -> None:
    findings = KeptFindings(tmp_path / "found")
    findings.write({str(number): number for number in range(MOST_FINDINGS + 5)})
    found = findings.read(dict) or {}
    assert list(found.values()) == list(range(5, MOST_FINDINGS + 5))


def test_what_is_decided_anew_is_the_latest(tmp_path: Path) -> None:
    findings = KeptFindings(tmp_path / "found")
    findings.write({"a": 1, "b": 2})
    for decided, order in (({"a": 1}, "ab"), ({"a": 3}, "ba"), ({"c": 4}, "bac"), ({"b": 5, "c": 4}, "abc")):
        findings.decide(findings.read(dict) or {}, decided)
        kept = findings.read(dict) or {}
        assert "".join(kept) == order
        assert kept.items() >= decided.items()
