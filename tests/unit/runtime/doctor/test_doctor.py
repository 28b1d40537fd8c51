"""The doctor as a whole: its report, and that no check that fails keeps it from the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_run.base.strict_json import to_json
from edge_run.devices.host import checkup
from edge_run.devices.host.findings import NOTE, OK, PROBLEM, Finding, Report
from edge_run.devices.host.ledger import Ledger
from edge_run.runtime.doctor import doctor, file_check
from edge_run.runtime.doctor import library_check as library


def test_a_report_counts_and_is_json() -> None:
    report = Report((Finding("a", OK, "fine"), Finding("b", NOTE, "slow", "do"), Finding("c", PROBLEM, "no", "do")))
    assert (report.problems, report.notes) == (1, 1)
    assert json.loads(to_json(report))["findings"][1] == {
        "topic": "b", "state": "note", "finding": "slow", "advice": "do",
    }  # fmt: skip


def test_whatever_a_check_fails_over_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such thing here")

    monkeypatch.setattr(library, "ask_library", lambda model: {"import_error": "ImportError: x", "ending": ""})
    for name in ("check_groups", "check_runs", "check_swap", "check_swapped", "check_overcommit", "check_map_count"):
        monkeypatch.setattr(checkup, name, fail)
    monkeypatch.setattr(doctor, "default_budget_bytes", fail)
    monkeypatch.setattr(library, "needed_versions", fail)
    monkeypatch.setattr(file_check, "find_mount", fail)
    report = doctor.examine(tmp_path / "none.gguf", tmp_path, ledger=Ledger(tmp_path))
    by_topic = {finding.topic: finding for finding in report.findings}
    assert by_topic["swap"].finding == "cannot be examined here (RuntimeError: no such thing here)"
    assert by_topic["model"].state == PROBLEM
    assert {"huge pages", "cache folder"} <= by_topic.keys()


def test_without_a_process_for_llama_cpp_the_others_are_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "no more of them")

    monkeypatch.setattr(library.subprocess, "run", refuse)
    report = doctor.examine(None, tmp_path, ledger=Ledger(tmp_path))
    by_topic = {finding.topic: finding for finding in report.findings}
    assert by_topic["llama.cpp"].state == PROBLEM
    assert "no process can be started for it" in by_topic["llama.cpp"].finding
    assert "swap" in by_topic
