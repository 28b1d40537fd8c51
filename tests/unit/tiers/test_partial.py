"""A model in pieces whose file system gives less at a time than it has."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from edge_run.tiers.partial import PartialModel
from edge_run.tiers.pieces import Pieces, read_at

MODEL, PIECES = "a" * 64, Pieces((10, 10, 10))
AT_A_TIME = 7


def test_no_piece_is_lost_where_the_journal_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(PartialModel(tmp_path, MODEL, PIECES)) as partial:
        for piece in range(PIECES.count):
            partial.write(piece, bytes(10))
        partial.sync()
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, offset: read(file, min(length, AT_A_TIME), offset))
    for _ in range(2):  # the first one would have cut the journal
        with closing(PartialModel(tmp_path, MODEL, PIECES)) as partial:
            assert not partial.missing(range(PIECES.count))


def test_what_is_read_ends_where_the_file_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "file", os.pread
    path.write_bytes(bytes(range(50)))
    monkeypatch.setattr(os, "pread", lambda file, length, offset: read(file, min(length, AT_A_TIME), offset))
    with path.open("rb") as file:
        assert read_at(file.fileno(), 20, 5) == bytes(range(5, 25))
        assert read_at(file.fileno(), 100, 40) == bytes(range(40, 50))
