"""A process that runs one model file after another, whatever they are, and the side that asks it.

Run as a child: each line of standard input is a request, each line of standard output says how it went. The process
that opens a file first is a fork here, of one that has its modules already: how it starts is tested elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from program import Program, begin, fork_from_here

TIMEOUT_S = 60
BLOW_UP_BYTES = 1 << 30
N_TOKENS = 4
OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}
PROMPT = "Once upon a time there was a little"


class Worker:
    """The side that asks. Starts a process when there is none; `ask` returns what became of a file."""

    def __init__(self, cache_folder: Path, backend: str) -> None:
        self._words = [sys.executable, __file__, str(cache_folder), backend]
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def ask(self, path: Path) -> dict[str, Any]:
        """Return `outcome`: refused, ran, died, hung, or the name of what was raised otherwise."""
        if self._process is None:
            environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"}
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
            )
            self.starts += 1
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(os.fsencode(path) + b"\n")
        process.stdin.flush()
        started = time.monotonic()
        is_ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        line = process.stdout.readline() if is_ready else b""
        if not line:
            self.close()
            return {"outcome": "died" if is_ready else "hung", "message": f"code {process.returncode}"}
        return {**json.loads(line), "wall_s": round(time.monotonic() - started, 3)}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _generate(path: Path, options: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the plan's mode, and the tokens after two prompts."""
    from edge_run import Model

    with Model(path, **OPTIONS, **options) as model:
        vocabulary = model._engine.model.vocabulary
        tokens = [token % vocabulary for token in range(5, 25)]
        answers = [model.generate(prompt, max_tokens=N_TOKENS, temperature=0).result() for prompt in (PROMPT, tokens)]
        return model.plan.mode, [token for answer in answers for token in answer.token_ids]


def _run(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a run with all in memory, after one with as little as can be, where edge-run runs it."""
    from edge_run import BudgetError

    if options["backend"] == "llama.cpp":
        return {"tokens": _generate(path, options)[1]}
    budget, spare, mode, streamed = 1 << 20, 1 << 18, "", []
    for _ in range(6):
        try:
            mode, streamed = _generate(path, {**options, "memory": budget})
        except BudgetError as error:
            budget, spare = error.minimum_bytes + spare, 0
            continue
        if mode == "streamed":
            break
        budget -= 1 << 20  # what the process holds already varies: a small model fits into it
    tokens = _generate(path, options)[1]
    if mode and streamed != tokens:
        raise AssertionError(f"with little memory {streamed}, with much {tokens}")
    return {"tokens": tokens, "streamed": mode == "streamed"}


def _outcome(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    from edge_run import EdgeRunError
    from edge_run.devices.host.memory import process_memory

    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_bytes, threads = process_memory().resident_bytes, threading.active_count()
    try:
        result: dict[str, Any] = {"outcome": "ran", **_run(path, options)}
    except EdgeRunError as error:
        result = {"outcome": "refused", "kind": type(error).__name__, "message": str(error)}
        if "\n" in str(error):
            result["outcome"] = "said in several lines"
    except Exception as error:
        result = {"outcome": type(error).__name__, "message": str(error)}
    grown_bytes = process_memory().peak_bytes - before_bytes
    if grown_bytes > BLOW_UP_BYTES:
        result["outcome"] = f"took {grown_bytes:,} bytes"
    if threading.active_count() > threads:
        result["outcome"] = f"left {threading.active_count() - threads} threads"
    return result


def _fork_inspectors() -> None:
    """Have the process that opens a file first forked."""
    import edge_run.runtime.inspection.inspector  # noqa: F401
    from edge_run.runtime.inspection import launcher

    fork_from_here()
    inspector = Program(["-c"], source=launcher._START)
    started = {"Popen": lambda command, **how: begin(inspector, **how)}
    launcher.subprocess = SimpleNamespace(**{**vars(subprocess), **started})  # type: ignore[assignment]


def main() -> None:
    """Answer requests until standard input ends."""
    cache_folder, backend = sys.argv[1:]
    options: dict[str, Any] = {
        "backend": backend,
        "cache_folder": Path(cache_folder),
        "check_file": backend != "llama.cpp",
    }
    if backend != "llama.cpp":
        _fork_inspectors()
        options["chunk_bytes"] = 1 << 14  # so that small models have something to stream
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        print(json.dumps(_outcome(Path(os.fsdecode(line.rstrip(b"\n"))), options)), file=answers, flush=True)


if __name__ == "__main__":
    main()
