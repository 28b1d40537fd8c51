"""The process that opens a model file first; `launcher.py` starts it.

The request comes as a line of JSON on standard input, whose end is the parent's. The answer on standard output is `ok`
and an `Inspection`, or `error` and what to raise, each on a line of its own; a process that dies instead says that the
file is to blame.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from edge_run.runtime.processes.child_process import limit, skip_package_code

MOST_DATA_BYTES = 2 << 30  # a vocabulary of 150,000 tokens and a graph of 80 layers take 160 MB
LONGEST_CPU_S = 30


def main() -> None:
    """Answer one request."""
    limit(DATA=MOST_DATA_BYTES, CORE=0, CPU=LONGEST_CPU_S)  # no endless computing, no core dump
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, also within llama.cpp
    request = json.loads(sys.stdin.buffer.readline().decode("utf-8", "surrogateescape"))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    skip_package_code("llama_cpp")
    from edge_run.base.config import ModelConfig
    from edge_run.base.error_codes import error_document
    from edge_run.base.errors import EdgeRunError
    from edge_run.runtime.inspection.inspector import inspect_here

    try:
        config = ModelConfig(threads=1, **request["config"])
        answer, text = "ok", inspect_here(Path(request["path"]), config, is_tried=request["is_tried"]).to_json()
    except EdgeRunError as error:
        answer, text = "error", json.dumps(error_document(error))
    sys.stdout.buffer.write(f"{answer}\n{text}".encode("utf-8", "surrogateescape"))
    sys.stdout.flush()
    os._exit(0)  # what is loaded need not be freed piece by piece


def _end_with_parent() -> None:
    """Wait till standard input ends, which is when the parent does; then end."""
    while os.read(0, 1):
        pass
    os._exit(1)
