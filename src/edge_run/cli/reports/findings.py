"""What was examined, a finding on a line: what `edge-run doctor` and `edge-run mesh doctor` write."""

from __future__ import annotations

import dataclasses

from edge_run.base.findings import NOTE, OK, PROBLEM, Finding, Report
from edge_run.cli.shared.printable import one_line
from edge_run.cli.shared.terminal import Terminal

STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}


def tidy(report: Report) -> Report:
    """Return `report` with each of its texts in one line."""
    return Report(tuple(_in_one_line(finding) for finding in report.findings))


def show_report(report: Report, terminal: Terminal) -> None:
    """Write `report`, a finding on a line."""
    width = max(len(finding.topic) for finding in report.findings)
    for finding in report.findings:
        advice = f" -> {finding.advice}" if finding.advice else ""
        _put(terminal, finding.state, f" {finding.topic:{width}}  {finding.finding}{advice}")
    _put(terminal, "", f"{_count(report.problems, 'problem')}, {_count(report.notes, 'note')}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


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
        name: "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(value.split()))
        for name, value in dataclasses.asdict(finding).items()
    }
    return Finding(**texts)
