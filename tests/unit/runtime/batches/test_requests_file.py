"""The requests of a batch: lines that are read one by one."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")

from batch_lines import LINE, write
from edge_run.base.config import REQUEST_TOKENS
from edge_run.base.errors import ConfigError, TierReadError
from edge_run.runtime.batches import input_file
from edge_run.runtime.batches.input_file import (
    CHAT,
    COMPLETIONS,
    BatchRequest,
    count_lines,
    read_requests,
    usual_tokens,
)
from edge_run.runtime.batches.results_file import ResultsFile
from edge_run.runtime.server.refusals import Refusal


def test_lines_are_read_in_order_and_empty_ones_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "in", LINE, "", {**LINE, "custom_id": "b"}, "  ")
    found = list(read_requests(path))
    assert [(line.number, line.key) for line in found] == [(1, "a"), (3, "b")]
    assert all(isinstance(line.asked, BatchRequest) for line in found)
    assert count_lines(path) == 2


def test_a_mark_that_an_editor_begins_a_file_with_is_no_part_of_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text(json.dumps(LINE) + "\n\ufeff{}", encoding="utf-8-sig")
    first, second = read_requests(path)
    assert (first.key, second.key) == ("a", 2)
    assert isinstance(second.asked, Refusal)


def test_how_long_requests_are_is_told_by_the_first_ones(tmp_path: Path) -> None:
    def usual(*bodies: dict[str, object], most_answer: int | None = None, url: str = CHAT) -> int:
        lines = ({**LINE, "url": url, "custom_id": str(number), "body": body} for number, body in enumerate(bodies))
        return usual_tokens(write(tmp_path / "in", "{", *lines), most_answer)

    short, long = {"prompt": "x" * 300, "max_tokens": 64}, {"prompt": "x" * 3000, "max_completion_tokens": 264}
    assert 160 < usual(short) < 180
    assert usual(short, long) == pytest.approx((usual(short) + usual(long)) / 2, abs=1)
    assert usual(*[short] * input_file.LOOKED_AT, long) == usual(short)
    unbounded = {"prompt": "x" * 300}
    assert usual(unbounded) == REQUEST_TOKENS
    assert usual({"prompt": "x" * 3000}) > 1000 + REQUEST_TOKENS // 2
    assert usual(unbounded, most_answer=64) == usual(short) - 5, "which is the bound's name"
    assert usual({**short, "max_tokens": 4096}, most_answer=64) == pytest.approx(usual(short), abs=1)
    assert usual(unbounded, url=COMPLETIONS) < 130
    assert usual(short, short, {"prompt": "x" * 10**6, "max_tokens": 64}) == usual(short), "one that is long"
    assert usual({"prompt": "x", "max_tokens": "many"}) == REQUEST_TOKENS
    assert usual({"prompt": "x", "max_tokens": 2**62}) == REQUEST_TOKENS
    assert usual_tokens(write(tmp_path / "bad", "{", "[]"), None) == REQUEST_TOKENS
    assert usual_tokens(write(tmp_path / "empty", ""), 64) == REQUEST_TOKENS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "the line is not JSON"),
        ("[]", "Expected `object`"),
        ({"url": "/v1/completions", "body": {}}, "custom_id: is missing"),
        ({**LINE, "custom_id": ""}, "custom_id"),
        ({**LINE, "custom_id": "x" * 513}, "custom_id"),
        ({**LINE, "body": "x"}, "body"),
        (LINE, "was on an earlier line"),
        ('{"a": ' * 100, "JSON"),
    ],
)
def test_a_line_that_cannot_be_is_told_and_others_go_on(tmp_path: Path, line: object, message: str) -> None:
    first, bad, last = read_requests(write(tmp_path / "in", LINE, line, {**LINE, "custom_id": "z"}))
    assert bad.key == bad.number == 2
    assert isinstance(bad.asked, Refusal)
    assert message in bad.asked.message
    assert (first.key, last.key) == ("a", "z")


def test_a_line_without_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "MOST_BODY_BYTES", 1000)
    bad, good = read_requests(write(tmp_path / "in", "x" * 5000, LINE))
    assert isinstance(bad.asked, Refusal)
    assert "more than 1000 B" in bad.asked.message
    assert good.key == "a"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_requests(tmp_path / "none"))


def test_what_has_no_end_is_not_read() -> None:
    for path in (Path("/dev/zero"), Path("/dev")):
        with pytest.raises(ConfigError, match="is no file with an end"):
            count_lines(path)
        with pytest.raises(ConfigError, match="it is no file"):
            ResultsFile(path)


def test_a_drive_that_fails_is_told_by_the_name_of_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(input_file, "_opened", lambda path: Failing())
    for read in (count_lines, lambda path: list(read_requests(path))):
        with pytest.raises(TierReadError, match=r"batch .*in: Input/output error; check the drive"):
            read(tmp_path / "in")
