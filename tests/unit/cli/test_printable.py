"""What is shown at a terminal: nothing that a terminal obeys, whoever wrote it."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata

import pytest

from edge_run.cli.shared.printable import (
    LogFormatter,
    PrintableStream,
    answer_text,
    one_line,
    printable,
    printable_json,
)
from edge_run.cli.shared.tables import align
from edge_run.cli.shared.terminal import Terminal

EVERY = "".join(map(chr, [*range(0x300), *range(0x2000, 0x2100)]))
NASTY = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\r\u202efake\x7f"


def controls(text: str, kept: str = "") -> list[str]:
    return [c for c in text if unicodedata.category(c) == "Cc" and c not in kept]


def test_no_control_character_is_left() -> None:
    assert not controls(printable(EVERY), "\n\t")
    assert not controls(one_line(EVERY))
    assert not controls(answer_text(EVERY), "\n\t")
    assert not controls(printable_json(json.dumps(EVERY, ensure_ascii=False)))


def test_ordinary_text_stays_as_it_is() -> None:
    text = "Größe 漢字 😀 [red]no markup[/red] שלום\n\ttabbed\\x1b"
    assert printable(text) == answer_text(text) == text
    assert printable(printable(NASTY)) == printable(NASTY)


def test_what_is_written_out() -> None:
    assert printable(NASTY) == r"\x1b]0;PWNED\x07\x1b[2J\x9b31m\x0d\u202efake\x7f"
    assert one_line("a\nedge-run: all is well") == r"a\nedge-run: all is well"
    assert answer_text("a\x1b[31m\r\n") == "a\ufffd[31m\ufffd\n"


def test_json_keeps_its_value() -> None:
    assert json.loads(printable_json(json.dumps([EVERY], ensure_ascii=False))) == [EVERY]


def test_a_cell_of_a_table_is_one_line() -> None:
    lines = align([("name", "size"), ("a\nb", NASTY)])
    assert len(lines) == 2
    assert not controls("".join(lines))


def test_the_log_is_escaped_and_a_traceback_keeps_its_lines() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(PrintableStream(stream))
    handler.setFormatter(LogFormatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("tests.printable")
    logger.propagate = False
    logger.addHandler(handler)
    try:
        raise ValueError(NASTY)
    except ValueError:
        logger.exception("found %s", f"{NASTY}\nINFO fake")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(r"\x7f\nINFO fake")
    assert rest[0].startswith("Traceback")
    assert not controls(stream.getvalue(), "\n")


@pytest.mark.parametrize("write", ["say", "say_lines", "write", "write_json"])
def test_a_terminal_object_writes_nothing_raw(write: str, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(Terminal(), write)(json.dumps(NASTY, ensure_ascii=False) if write == "write_json" else NASTY)
    out = "".join(capsys.readouterr())
    assert "PWNED" in out
    assert not controls(out, "\n")


def test_an_answer_in_a_pipe_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().write_answer(NASTY)
    assert capsys.readouterr().out == NASTY


def test_markup_is_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().say("[red]x[/red] :smile: [link=http://a]b[/link]")
    assert re.fullmatch(r"\[red\]x\[/red\] :smile: \[link=http://a\]b\[/link\]\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "text", ["plain", "a\ttab", "x" * 400, "two\nlines, the second  spaced ", "\u4f60\u597d \u2026"]
)
def test_a_notice_without_a_terminal_is_what_rich_writes(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Terminal().say_lines(text, "red")
    plain = capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    Terminal().say_lines(text)
    assert plain == capsys.readouterr().err
    Terminal().say_lines(text, "red")
    coloured = capsys.readouterr().err
    assert "\x1b[31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_standard_error_is_given_back() -> None:
    from edge_run.cli.shared.process import printable_notices

    before = sys.stderr
    with printable_notices():
        assert isinstance(sys.stderr, PrintableStream)
    assert sys.stderr is before
