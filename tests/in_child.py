"""Tests and scripts in a process of their own: a read of weights that are not resident ends only that process.

`@in_child` runs a test function there, with the same arguments (fixtures, parameters), which must be picklable. What
the child prints is shown when it fails. Children are forks of one process that has everything imported but has begun
nothing: to import it takes as long as many of these tests.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path

import pytest

TIMEOUT_S, END_S = 110, 5  # together less than a test may take
SKIPPED = 77
PRELOADED = [
    *("edge_run.runtime.engine.engine", "edge_run.runtime.generation.model", "numpy", "numpy.random", "pytest"),
    *("unittest.mock", "in_child", "tiny_models", "slices", "small_engines", "talks", "kept_prompts"),
    *("spilling", "witness", "sabotage", "mesh_runs"),  # and what these import
]


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """Return a test that runs `test` in a child process."""

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        done = _forked(_test, (inspect.getfile(test), test.__name__, arguments))
        if done.returncode == SKIPPED:
            pytest.skip(done.stdout.strip())
        if done.returncode != 0:
            ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
            pytest.fail(f"{test.__name__} in a child process: {ended}\n{done.stdout}{done.stderr}", pytrace=False)

    return run


def run_script(path: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as `python PATH ARGUMENTS` would, in a child process. Fails where that takes too long."""
    return _forked(_script, (str(path), arguments))


def _forked(work: Callable[..., None], arguments: tuple[object, ...]) -> subprocess.CompletedProcess[str]:
    """Run `work(*arguments)` in a child with this process's environment; return its exit status and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        place = dict(os.environ), os.getcwd(), str(out), str(err)
        child = _context().Process(target=_begin, args=(place, work, arguments))
        child.start()
        try:
            child.join(TIMEOUT_S)
            is_late = child.exitcode is None
            if is_late:
                assert child.pid is not None
                os.kill(child.pid, signal.SIGINT)  # so that it says where it is, and ends what it started
                child.join(END_S)
        finally:
            child.kill()
            child.join()
        said = [file.read_text("utf-8", "replace") if file.exists() else "" for file in (out, err)]
        if is_late:
            pytest.fail(f"it takes more than {TIMEOUT_S} s\n{''.join(said)}", pytrace=False)
        assert child.exitcode is not None
        return subprocess.CompletedProcess([work.__name__, *map(str, arguments)], child.exitcode, *said)


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 does not tell it where modules are
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def _begin(
    place: tuple[dict[str, str], str, str, str], work: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    gc.freeze()  # what was preloaded
    environment, folder, *files = place
    for number, file in enumerate(files, 1):
        handle = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    work(*arguments)


def _test(path: str, name: str, arguments: dict[str, object]) -> None:
    """Run one test function of one file."""
    sys.path[:0] = [str(Path(path).parent), str(Path(__file__).parent)]
    test = inspect.unwrap(getattr(importlib.import_module(Path(path).stem), name))
    try:
        test(**arguments)
    except pytest.skip.Exception as reason:
        print(reason)
        sys.exit(SKIPPED)


def _script(path: str, arguments: Sequence[str]) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
