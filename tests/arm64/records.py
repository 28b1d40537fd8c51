"""For pytest: keeps how each test ended, so that a run that was stopped can go on where it was.

--records FILE: a line of JSON for each test that ran. Tests that passed or were skipped there are not run again.
--seconds N: after so many seconds no further test begins, and the exit status is 2.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

DONE = ("passed", "skipped")
MOST_LETTERS = 4000  # of what a failure says

_ADVICE = "QEMU does not pass on to the kernel what memory is advised to be (madvise)"
_UNREADABLE = "QEMU does not say what is in memory where nothing can be read"
NOT_EMULATED = {
    "test_a_frame_stays_out_of_forks_and_core_dumps_wherever_it_moves": _ADVICE,
    "test_a_table_is_kept_out_of_huge_pages_forks_and_core_dumps": _ADVICE,
    "test_a_table_apart_has_the_same_rows_elsewhere": _UNREADABLE,
    "test_memory_is_as_promised_and_each_byte_is_written_once": _UNREADABLE,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--records", type=Path, required=True)
    parser.addoption("--seconds", type=float, default=float("inf"))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Records(config.getoption("records"), config.getoption("seconds")))


class Records:
    """What is known of each test, and what this run finds out."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._end_s = file, time.time() + seconds
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.exists() else []
        self._outcomes: dict[str, str] = {line["test"]: line["outcome"] for line in lines}
        self._began_s, self._parts = 0.0, list[pytest.TestReport]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if self._outcomes.get(item.nodeid) in DONE]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]
        for item in items:
            if (reason := NOT_EMULATED.get(item.name)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_runtest_logstart(self) -> None:
        self._began_s, self._parts = time.time(), []

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.time() > self._end_s:
            item.session.shouldstop = "the time is over"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._parts.append(report)
        if report.when != "teardown":
            return
        worst = min(self._parts, key=lambda part: ("failed", "skipped", "passed").index(part.outcome))
        why = worst.longrepr[2] if isinstance(worst.longrepr, tuple) else str(worst.longrepr or "")
        line = {
            "test": report.nodeid,
            "outcome": worst.outcome,
            "seconds": round(time.time() - self._began_s, 1),
            "why": why[-MOST_LETTERS:],
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
