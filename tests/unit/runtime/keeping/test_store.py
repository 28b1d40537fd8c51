"""What is kept of prompts, as files: what a process that was killed left of one is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from edge_run.runtime.keeping.identity import KeptIdentity
from edge_run.runtime.keeping.store import PromptStore


def test_drafts_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    facts = {"library": "x", "path": "/model", "file": "1"}
    store = PromptStore(tmp_path, KeptIdentity(bytes(16), facts), 1 << 20)
    other = PromptStore(tmp_path, KeptIdentity(bytes([1] * 16), facts), 1 << 20)
    rows = other.path_of(bytes(16), 0)
    rows.write_bytes(b"rows")
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left, written = (rows.with_name(f".{rows.name}.{n}-00000000.part") for n in (int(done.stdout), os.getppid()))
    for draft in (left, written):
        draft.write_bytes(b"ro")
        os.utime(draft, (0, 0))
    store.clean(lambda text: None)
    assert (left.exists(), written.exists(), rows.exists()) == (False, True, True)
