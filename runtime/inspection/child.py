"""The process that opens a model file first; `launcher.py` starts it.

Its answer is an `Inspection`, or an error; a process that dies instead says that the file is to blame.
"""

from __future__ import annotations

import signal
from pathlib import Path

from edge_run.runtime.processes.child_answer import give_answer, take_request
from edge_run.runtime.processes.child_process import limit

MOST_DATA_BYTES = 2 << 30  # a vocabulary of 150,000 tokens and a graph of 80 layers take 160 MB
LONGEST_CPU_S = 30


def main() -> None:
    """Answer one request."""
    limit(DATA=MOST_DATA_BYTES, CORE=0, CPU=LONGEST_CPU_S)  # no endless computing, no core dump
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, also within llama.cpp
    request = take_request()
    from edge_run.base.config import ModelConfig
    from edge_run.runtime.inspection.inspector import inspect_here

    def answer() -> str:
        config = ModelConfig(threads=1, **request["config"])
        return inspect_here(Path(request["path"]), config, is_tried=request["is_tried"]).to_json()

    give_answer(answer, request["flags"])
