"""Tests in a process of their own: one that reads weights that are not resident ends only that process, and fails.

`@in_child` runs a test function there, with the same arguments (fixtures, parameters), which must be picklable. What
the child prints is shown when it fails.
"""

from __future__ import annotations

import base64
import functools
import inspect
import os
import pickle
import runpy
import subprocess
import sys
from collections.abc import Callable

import pytest

TIMEOUT_S = 110
SKIPPED = 77


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """Return a test that runs `test` in a child process."""

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        packed = base64.b64encode(pickle.dumps(arguments)).decode()
        done = subprocess.run(
            [sys.executable, __file__, inspect.getfile(test), test.__name__, packed],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"},
        )
        if done.returncode == SKIPPED:
            pytest.skip(done.stdout.strip())
        if done.returncode != 0:
            ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
            pytest.fail(f"{test.__name__} in a child process: {ended}\n{done.stdout}{done.stderr}", pytrace=False)

    return run


def main() -> int:
    """Run one test function of one file."""
    path, name, packed = sys.argv[1:]
    test = inspect.unwrap(runpy.run_path(path)[name])
    try:
        test(**pickle.loads(base64.b64decode(packed)))
    except pytest.skip.Exception as reason:
        print(reason)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
