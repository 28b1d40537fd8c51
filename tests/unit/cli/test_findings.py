"""Findings as they are written: each of their texts in one line, with commands that can be copied."""

from __future__ import annotations

import shlex

from edge_run.cli.reports.findings import _in_one_line
from edge_run.devices.host.findings import NOTE, Finding


def test_a_command_in_a_finding_keeps_the_blanks_of_a_path() -> None:
    path = "/a  b/demo-x"
    found = _in_one_line(Finding("left\nover", NOTE, f"one\n  {path}", shlex.join(["rm", "-r", path])))
    assert (found.topic, found.finding) == ("left over", f"one   {path}")
    assert shlex.split(found.advice)[2] == path
