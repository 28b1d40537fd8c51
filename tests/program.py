"""Programs in processes of their own that have our modules already: forks of one that only imported them.

To import them takes half of what a short command takes. What concerns the start of the program, terminals or signals
is tested with `python -m edge_run` instead (`run_anew`).
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WAIT_S = 110.0  # less than a test may take, and long on a busy machine
_PRELOADED = ("edge_run.cli.app", "edge_run.cli.commands.run", "edge_run.runtime.generation.model", "numpy.random")
_READY = b"+"
_THE_USERS = ("EDGE_RUN_", "XDG_", "NO_COLOR", "FORCE_COLOR", "TTY_", "PYTHONUNBUFFERED")

Result = subprocess.CompletedProcess[str]


def fresh_environment(home: Path, **settings: str) -> dict[str, str]:
    """Return an environment as if nobody had ever configured anything, but for `settings`, with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_THE_USERS)}
    return {**kept, "HOME": str(home), **settings}


def assert_refused(result: Result, code: int, pattern: str) -> None:
    """Assert that the program ended with `code`, and said one line that `pattern` matches a part of."""
    assert (result.returncode, result.stdout) == (code, "")
    assert re.fullmatch(rf"edge-run: [^\n]*{pattern}[^\n]*\n", result.stderr), result.stderr


def run_anew(
    *words: object,
    environment: Mapping[str, str],
    folder: Path,
    before: Sequence[str] = (),
    text: str = "",
    **how: Any,
) -> Result:
    """Run `python -m edge_run WORDS` behind the command `before`; how: as `subprocess.run` takes it."""
    command = [*before, sys.executable, "-m", "edge_run", *map(str, words)]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, env=environment, cwd=folder, timeout=WAIT_S, check=False,
        **how,
    )  # fmt: skip


def run_program(
    *words: object,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    text: str = "",
    timeout_s: float = WAIT_S,
) -> Result:
    """Run `edge-run WORDS` with `text` as its input, in `folder`. Raises TimeoutExpired, when it was ended."""
    return _run([*map(str, words)], "", environment, folder, text, timeout_s)


def run_source(
    source: str,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    text: str = "",
    timeout_s: float = WAIT_S,
) -> Result:
    """Run `python -c SOURCE`, else as `run_program`."""
    return _run(["-c"], source, environment, folder, text, timeout_s)


def _run(
    command: list[str],
    source: str,
    environment: Mapping[str, str] | None,
    folder: Path | None,
    text: str,
    timeout_s: float,
) -> Result:
    place = {
        "words": command,
        "source": source,
        "environment": dict(os.environ if environment is None else environment),
    }
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode())
        given.seek(0)
        request = json.dumps({**place, "folder": str(folder or os.getcwd())}).encode()
        code = _mother().run(request, [file.fileno() for file in (given, out, err)], timeout_s)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout_s, said[0], said[1])
    return subprocess.CompletedProcess(command, code, *said)


class _Mother:
    """A process that forks for each request. It ends when this one does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def run(self, request: bytes, files: list[int], timeout_s: float) -> int | None:
        """Return the exit code of a child with these standard files, None when it had to be killed."""
        with self._lock:
            socket.send_fds(self._line, [len(request).to_bytes(4, "big")], files)
            self._line.sendall(request)
            child = int.from_bytes(self._receive(4), "big")
            self._line.settimeout(timeout_s)
            try:
                code = int.from_bytes(self._receive(4), "big", signed=True)
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                self._line.settimeout(None)
                self._receive(4)
                return None
            finally:
                self._line.settimeout(None)
            return code

    def _receive(self, size: int) -> bytes:
        found = self._line.recv(size, socket.MSG_WAITALL)
        assert len(found) == size, f"the process that starts programs ended with {self._process.wait()}"
        return found


@functools.cache
def _mother() -> _Mother:
    return _Mother()


def _serve(line: socket.socket) -> dict[str, object] | None:
    """Fork for each request until there are no more; return what a child is to do, to the child, and then None."""
    while True:
        size, files, _, _ = socket.recv_fds(line, 4, 3)
        if not size:
            return None
        request: dict[str, object] = json.loads(line.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        child = os.fork()
        if child == 0:
            line.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return request
        for file in files:
            os.close(file)
        line.sendall(child.to_bytes(4, "big"))
        _, status = os.waitpid(child, 0)
        line.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def _begin() -> None:
    import gc
    import importlib

    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(str(request["folder"]))
    environment = request["environment"]
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    words, source = request["words"], request["source"]
    assert isinstance(words, list)
    if source:
        sys.argv, sys.path[0] = words, ""
        exec(compile(str(source), "<string>", "exec"), {"__name__": "__main__"})
        return
    import edge_run.__main__ as program

    sys.argv = [str(program.__file__), *words]
    program.main()


if __name__ == "__main__":
    _begin()
