"""What was examined, a finding on a line: what `edge-run doctor` and `edge-run mesh doctor` write."""

from __future__ import annotations

import dataclasses
import re
from typing import NoReturn

import click

from edge_run.base.strict_json import to_json
from edge_run.base.units import format_count
from edge_run.cli.shared.printable import one_line
from edge_run.cli.shared.terminal import Terminal
from edge_run.devices.host.findings import NOTE, OK, PROBLEM, Finding, Report

EXIT_CODES = """
Exit code: 0 when nothing is a problem, notes or not; 1 when something is.
"""
STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}
_LINE_ENDS = re.compile(r"[^\S ]+")  # all that is blank but blanks, which a path in a command keeps


def end_with_report(context: click.Context, report: Report, is_json: bool) -> NoReturn:
    """Write `report`, each of its texts in one line, and end the command with its exit code (`EXIT_CODES`)."""
    terminal: Terminal = context.obj
    report = Report(tuple(_in_one_line(finding) for finding in report.findings))
    if is_json:
        terminal.write_json(to_json(report))
    else:
        _show(report, terminal)
    context.exit(1 if report.problems else 0)


def _show(report: Report, terminal: Terminal) -> None:
    width = max(len(finding.topic) for finding in report.findings)
    for finding in report.findings:
        advice = f" -> {finding.advice}" if finding.advice else ""
        _put(terminal, finding.state, f" {finding.topic:{width}}  {finding.finding}{advice}")
    _put(terminal, "", f"{format_count(report.problems, 'problem')}, {format_count(report.notes, 'note')}")


def _put(terminal: Terminal, state: str, text: str) -> None:
    """Write a line of the report, at a terminal in colour. It stays one line, so that commands can be copied."""
    text = one_line(text)
    if not terminal.shows_answer:
        terminal.write(f"{state:7}{text}\n" if state else f"{text}\n")
        return
    from rich.console import Console
    from rich.text import Text

    line = Text(f"{state:7}" if state else "", style=STYLES.get(state, "bold")).append(text, style="default")
    Console(soft_wrap=True, highlight=False, markup=False, emoji=False).print(line)


def _in_one_line(finding: Finding) -> Finding:
    """Return `finding` without what file names or libraries may have in them: line breaks, control characters."""
    texts = {
        name: "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in _LINE_ENDS.sub(" ", value).strip())
        for name, value in dataclasses.asdict(finding).items()
    }
    return Finding(**texts)
