"""Programs in processes of their own that have our modules already: forks of one that only imported them.

To import them takes half of what a short command takes, and to free them at its end a quarter, so both are left out.
That one is a process of its own, or this one at its start (`fork_from_here`). What concerns the start of the program,
how it ends by a signal, or what Python frees at its end, is tested with `python -m edge_run` instead (`run_anew`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, AnyStr, NoReturn

from namespaces import enter

WAIT_S = 110.0  # less than a test may take, and long on a busy machine
PRELOADED = (
    *("edge_run.cli.app", "edge_run.cli.commands.run", "edge_run.runtime.generation.model", "numpy.random"),
    *("difflib", "psutil"),  # imported when a model is opened
)
MESH = (  # what a device of a mesh imports besides, when it needs it
    *("aiomqtt", "zmq", "zstandard", "cryptography.hazmat.primitives.ciphers.aead", "edge_run.devices.mesh.serving"),
    *(f"cryptography.hazmat.primitives.asymmetric.{name}" for name in ("ed25519", "x25519")),
)
_MESH_COMMANDS = (
    *PRELOADED,
    *MESH,
    *(f"edge_run.cli.mesh.{name}" for name in ("group", "change", "doctor", "init", "invitation", "invite", "join")),
    *(f"edge_run.devices.mesh.{name}" for name in ("changes", "checkup", "entry", "watch")),
    *("edge_run.cli.mesh.status", "edge_run.cli.shared.settings", "edge_run.runtime.worker.worker"),
)
MOST_FILES = 16  # that a request comes with
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
    return _run(Program([str(word) for word in words]), environment, folder, text, timeout_s)


def run_source(
    source: str,
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> Result:
    """Run `python -c SOURCE`, else as `run_program`."""
    return _run(Program(["-c"], source=source), environment, folder, "", WAIT_S)


def _run(
    program: Program, environment: Mapping[str, str] | None, folder: Path | None, text: str, timeout_s: float
) -> Result:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode())
        given.seek(0)
        with begin(program, stdin=given, stdout=out, stderr=err, env=environment, cwd=folder) as process:
            try:
                process.wait(timeout_s)
                is_late = False
            except subprocess.TimeoutExpired:
                process.kill()
                is_late = True
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    if is_late:
        raise subprocess.TimeoutExpired(program.words, timeout_s, said[0], said[1])
    return subprocess.CompletedProcess(program.words, process.returncode, *said)


@dataclass(frozen=True)
class Program:
    """What a process is to run: `edge-run WORDS`; or the file `script`, or `source`, with these words.

    netns: the network namespace that it enters before.
    """

    words: list[str]
    script: str = ""
    source: str = ""
    netns: str = ""


@contextlib.contextmanager
def ending(process: subprocess.Popen[AnyStr]) -> Iterator[subprocess.Popen[AnyStr]]:
    """Kill a process at the end of this block, where it has not ended, and wait for it."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[AnyStr]) -> AnyStr:
    """Return the next line that a process says, an empty one where it ends; where none comes in time, it is killed."""
    assert process.stdout is not None
    limit = threading.Timer(WAIT_S, process.kill)
    limit.start()
    try:
        return process.stdout.readline()
    finally:
        limit.cancel()


def begin(program: Program, mother: Mother | None = None, **how: Any) -> subprocess.Popen[Any]:
    """Start a process as `subprocess.Popen` does, with its arguments; one that has the modules of `mother` already."""
    return _Begun(program, mother or _usual_mother(program), **how)


class _Begun(subprocess.Popen[Any]):
    """A process that another one forks, and waits for: that one is told what to do, and says how it ended."""

    def __init__(self, program: Program, mother: Mother, **how: Any) -> None:
        self._program, self._mother = program, mother
        self._hearing = threading.Lock()  # a timer that sends a signal asks first whether it is there
        self._line, self._theirs = socket.socketpair()
        super().__init__(program.words, **how)

    def _execute_child(self, *arguments: Any, **_: Any) -> None:
        passed, folder, environment = sorted(arguments[4]), arguments[5], arguments[6]
        ends = arguments[10:16]
        request = {
            **asdict(self._program),
            "passed": passed,
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.fspath(folder or os.getcwd()),
        }
        files = [end if end != -1 else number for number, end in enumerate((ends[0], ends[3], ends[5]))]
        try:
            self._mother.ask(json.dumps(request).encode(), [*files, self._theirs.fileno(), *passed])
            self.pid = self._heard()
        finally:
            self._theirs.close()
            self._close_pipe_fds(*ends)
        self._child_created = True

    def __del__(self, *_: object) -> None:
        super().__del__()
        if self.returncode is not None:  # else it is looked after still
            self._line.close()

    def _heard(self) -> int:
        found = self._line.recv(4, socket.MSG_WAITALL)
        if self._mother.has_ended:
            return -signal.SIGKILL
        assert len(found) == 4, "the process that starts programs has ended"
        return int.from_bytes(found, "big", signed=True)

    def _internal_poll(self, _deadstate: object = None, **_: object) -> int | None:
        with self._hearing:
            if self.returncode is None and select.select([self._line], [], [], 0)[0]:
                self.returncode = self._heard()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None and not select.select([self._line], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self._internal_poll()
        assert code is not None
        self._line.close()
        return code


def fork_from_here(modules: Sequence[str] = ()) -> None:
    """Let programs be forks of this process as it is now, with all that it has imported; it has begun nothing yet.

    modules: are imported first, once for all that are forked.
    """
    _preload(modules)
    line, theirs = socket.socketpair()
    if os.fork() == 0:
        line.close()
        _begin(theirs)
        sys.exit()
    theirs.close()
    _own_mother[:] = [Mother(line)]


class Mother:
    """The other side of a process that forks for each request. It ends when this one does."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._lock, self._line, self._process = threading.Lock(), line, process
        self.has_ended = False  # and has killed what it had forked

    @classmethod
    def start(cls, modules: Sequence[str] = PRELOADED, environment: Mapping[str, str] | None = None) -> Mother:
        """Start one that has these modules."""
        line, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        return cls(line, process)

    def close(self) -> None:
        """End it, and what it has forked."""
        self._line.close()
        if self._process:
            self._process.wait()
        self.has_ended = True

    def ask(self, request: bytes, files: list[int]) -> None:
        """Have a child begin with these files: its standard ones, a socket that gets its id, and how it ended; others.

        The others have the numbers in the child that the request says.
        """
        with self._lock:
            socket.send_fds(self._line, [len(request).to_bytes(4, "big")], files)
            self._line.sendall(request)


_own_mother: list[Mother] = []  # what `fork_from_here` made
_usual_mothers: dict[tuple[str, ...], Mother] = {}  # by what they have; each is there when it was needed


def _usual_mother(program: Program) -> Mother:
    """Return what `program` is a fork of: this process as it was, or one that has the modules of such programs."""
    if _own_mother:
        return _own_mother[0]
    is_of_mesh = not program.script and not program.source and program.words[:1] == ["mesh"]
    modules = _MESH_COMMANDS if is_of_mesh else PRELOADED
    if modules not in _usual_mothers:
        _usual_mothers[modules] = Mother.start(modules)
    return _usual_mothers[modules]


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork for each request until there are no more; return what a child is to do, to the child, and then None."""
    children: dict[int, socket.socket] = {}
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        if ended in select.select([line, ended], [], [])[0]:
            ended.recv(1 << 12)
            _tell_ends(children)
            continue
        size, files, _, _ = socket.recv_fds(line, 4, MOST_FILES)
        if not size:
            for child in children:  # which would compute beside whatever comes next
                os.kill(child, signal.SIGKILL)
            return None
        request: dict[str, Any] = json.loads(line.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (line, ended, wake, *children.values()):
                one.close()
            numbers = (0, 1, 2, *request.pop("passed"))
            spare = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in (*files[:3], *files[4:])]
            for file in files:
                os.close(file)
            for number, file in zip(numbers, spare, strict=True):
                os.dup2(file, number)
                os.close(file)
            return request
        for file in (*files[:3], *files[4:]):
            os.close(file)
        children[child] = socket.socket(fileno=files[3])
        children[child].sendall(child.to_bytes(4, "big"))


def _tell_ends(children: dict[int, socket.socket]) -> None:
    """Say of each child that ended how that was, to whoever waits for it."""
    for child in list(children):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            with children.pop(child) as line, contextlib.suppress(OSError):  # nobody may wait any more
                line.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def _begin(line: socket.socket) -> None:
    """Serve until the line ends; in a child, be what is asked for, and end."""
    gc.collect()
    gc.freeze()
    request = _serve(line)
    if request is None:
        return
    try:
        _be(request)
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, (int, NoneType)):
            raise
        code = end.code or 0
    _end(code)


def _end(code: int) -> NoReturn:
    """End this process as Python does, but without freeing the modules that it had from its beginning."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream and not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(code)  # says so
    os._exit(code)


def _be(request: Mapping[str, object]) -> None:
    """Do what is asked for, as a program of its own does it; what Python raises at its end is raised."""
    if request["netns"]:
        enter(str(request["netns"]))
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.chdir(str(request["folder"]))
    environment, words, script = request["environment"], request["words"], str(request["script"])
    assert isinstance(environment, dict)
    assert isinstance(words, list)
    os.environ.clear()
    os.environ.update(environment)
    if request["source"]:
        sys.argv, sys.path[0] = words, ""
        exec(compile(str(request["source"]), "<string>", "exec"), {"__name__": "__main__"})
        return
    if script:
        import runpy

        sys.argv = [script, *words]
        runpy.run_path(script, run_name="__main__")
        return
    import edge_run.__main__ as program

    sys.argv = [str(program.__file__), *words]
    program.main()


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        with contextlib.suppress(ImportError):  # whoever needs it says what is missing
            importlib.import_module(module)


if __name__ == "__main__":
    _preload(sys.argv[2:])
    _begin(socket.socket(fileno=int(sys.argv[1])))
