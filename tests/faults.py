"""Goes through the calls of a kind that something makes, each of them failing once, and says what came of each.

A worker does it (`fault_worker.py`), a fork of a process under the injector; where a signal ends it, or it says nothing
for long, that is a result, and another worker goes on with the next call.
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from injector import environment
from program import Mother, Program, begin

WORKER = Path(__file__).with_name("fault_worker.py")
PATIENCE_S = 60.0
RIGHT = ("went on", "refused", "out of memory")


def is_right(found: dict[str, Any]) -> bool:
    """Whether a failing call did no harm: it was said in one line or did not matter, and all works afterwards."""
    return found["outcome"] in RIGHT and bool(found.get("usable"))


@functools.cache
def _mother(library: Path) -> Mother:
    """Return what workers are forks of: it is under the injector, and has all that they import, which takes long."""
    return Mother.start(("fault_scenarios",), environment(library))


def sweep(
    library: Path, scenario: str, folder: Path, kind: str, caller: str, error: int, step: int = 1, most: int = 10**6
) -> Iterator[dict[str, Any]]:
    """Yield what came of each `step`th call; the last one has `calls`, how many there were."""
    first = 1
    while True:
        words = [scenario, folder, kind, caller, error, first, step, most]
        with tempfile.TemporaryFile() as errors:
            with begin(
                Program([str(word) for word in words], script=str(WORKER)),
                _mother(library),
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**environment(library), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "xdg")},
            ) as worker:
                try:
                    trying = yield from _listen(worker)
                finally:
                    worker.kill()
                    code = worker.wait()
            if trying is None:
                return
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().splitlines()
        if not trying:
            raise AssertionError(f"{scenario}: the worker never began\n" + "\n".join(said[-20:]))
        what = "hung" if code == -9 else f"signal {-code}" if code < 0 else f"exit {code}"
        yield {"number": trying, "outcome": what, "usable": False, "message": " | ".join(said)[:2000]}
        most -= (trying - first) // step + 1
        first = trying + step
        if most <= 0:
            return


def _listen(worker: subprocess.Popen[bytes]) -> Generator[dict[str, Any], None, int | None]:
    """Yield the results of a worker; return which call it was trying when it ended or hung, None where it was done."""
    assert worker.stdout is not None
    trying, rest = 0, b""
    while select.select([worker.stdout], [], [], PATIENCE_S)[0]:
        data = os.read(worker.stdout.fileno(), 65536)
        if not data:
            return None if worker.wait(PATIENCE_S) == 0 else trying
        *lines, rest = (rest + data).split(b"\n")
        for line in map(json.loads, lines):
            trying = line.get("trying", trying)
            if "trying" not in line:
                yield line
    return trying
