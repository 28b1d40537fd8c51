"""What a process that opens a model file first has before it is asked to: those of tests are forks of one that has it.

What it holds besides weights is what it would hold if it had started anew: pages of files that only the process that it
is a fork of has looked at count too.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

from edge_run.devices.host.memory import ProcessMemory, process_memory

inspector = importlib.import_module("edge_run.runtime.inspection.inspector")
FILE_BYTES = process_memory().file_bytes


def as_if_started_anew() -> ProcessMemory:
    """Return what this process holds, with all that was mapped of files before it was forked."""
    found = process_memory()
    return replace(found, resident_bytes=found.resident_bytes + max(0, FILE_BYTES - found.file_bytes))


inspector.process_memory = as_if_started_anew  # type: ignore[attr-defined]
