"""For pytest, of `llama_server_tests.py`: models of this machine instead of downloads, and what came of each test."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

sys.modules.setdefault("wget", types.ModuleType("wget"))  # only downloads need it

import utils  # noqa: E402 - of llama-server's tests, which are on the path

TEXT, ENCODER, DRAFT = (os.environ.get(f"TESTS_{name}") for name in ("TEXT", "ENCODER", "DRAFT"))
FOUND = Path(os.environ["TESTS_FOUND"])
_start = utils.ServerProcess.start


def _start_with_ours(server: Any, timeout_seconds: int = 120) -> None:
    """Start a server with a model that is here; skip the test where none is like the one it wants."""
    wanted = f"{server.model_hf_repo} {server.model_hf_file}"
    if "stories" in wanted:
        model = TEXT
    elif "bert-bge" in wanted:
        model = ENCODER
    else:
        model = None
    if model is None:
        pytest.skip(f"no model like {wanted}")
    server.model_file, server.model_hf_repo, server.model_hf_file, server.offline = model, None, None, False
    server.n_threads = server.n_threads or 1  # several that wait for each other are slow on a busy machine
    _start(server, max(timeout_seconds, 120))


def _draft(url: str, output_file_path: str | None = None) -> str:
    if DRAFT is None:
        pytest.skip("no draft model")
    return DRAFT


utils.ServerProcess.start = _start_with_ours
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.download_file = _draft


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out the tests whose outcome is known."""
    known = {json.loads(line)["test"] for line in FOUND.read_text().splitlines()}
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how a test ended, and the line that says why."""
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = (
            crash.message
            if crash
            else str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr or "")
        )
        with FOUND.open("a") as file:
            line = {"test": report.nodeid, "outcome": report.outcome, "reason": reason[:2000], "when": report.when}
            file.write(json.dumps(line) + "\n")
