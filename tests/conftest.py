"""For all tests: Ctrl-C works in children, and who must be alone is, when several run at once.

Ctrl-C works also where the suite itself was started in the background, and ignores it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest
from hypothesis import HealthCheck, settings

from edge_run.base.files.folders import cache_folder

DOOR = Path(gettempdir()) / f"edge-run-tests-{os.getuid()}"  # of all runs of the suite on this machine

# Children share the cores with other tests, so their threads let others run while they wait. And hundreds of them
# import the same: what is compiled is kept, apart from the sources where it was asked to leave those alone.
os.environ.update(OMP_WAIT_POLICY="passive", OPENBLAS_NUM_THREADS="1", GGML_NO_BACKTRACE="1")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "bytecode")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "on a busy machine too", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("on a busy machine too")

_thawed = list[bool]()  # what was frozen, since it was looked at last


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Let no other worker do the same meanwhile: it finds what this one has made, and need not make it too."""
    with open(f"{DOOR}-once", "w") as file:  # closing it ends the lock
        fcntl.lockf(file, fcntl.LOCK_EX, 1, zlib.crc32(what.encode()))
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a run of the suite has for all its tests.

    Each tiny model is made once, and copied from there. And the cache folder is new: what the user's own says of this
    device, and what it keeps of files, is neither read nor replaced, nor how long reading it takes.
    """
    own = tmp_path_factory.getbasetemp()
    run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    os.environ["TINY_MODELS"] = str(run / "tiny-models")
    os.environ.setdefault("MPLCONFIGDIR", str(cache_folder().with_name("matplotlib")))  # its fonts, found before
    os.environ["XDG_CACHE_HOME"] = str(run / "cache")


@pytest.fixture
def anyio_backend() -> str:
    """asyncio: what comes with Python, and what servers and clients run on."""
    return "asyncio"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each of several workers begin with its share of what takes long, and none wait for another in the end.

    Workers begin with equal numbers of tests in a row, and take over what others have last. Some files wait more than
    they compute, and are neighbours: workers begin at different places, so that not all wait at the same time. What
    must be alone comes first, when nobody has to end something for that.
    """
    n_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if n_workers == 1:
        return
    alone = [item for item in items if item.get_closest_marker("alone")]
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item in alone:
            continue
        files.setdefault(item.path, []).append(item)
    long = [path for path in files if path.parent.name in ("integration", "property")]
    short = [item for path in files if path not in long for item in files[path]]
    n_tests = len(items)
    items[:] = alone
    for number in range(n_workers):
        part = long[number::n_workers]
        start = len(part) * number // n_workers
        items += [item for path in part[start:] + part[:start] for item in files[path]]
        n_lacking = max(0, n_tests * (number + 1) // n_workers - len(items))
        items += short[:n_lacking]
        del short[:n_lacking]
    items += short


@pytest.hookimpl(wrapper=True, specname="pytest_collection_modifyitems")
def find_constants() -> Generator[None, object, object]:
    """Have Hypothesis look for constants in our sources in one worker, which keeps what it finds for the others."""
    with one_at_a_time("constants"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported: hardly any of what they make is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    """Have each file's assertions rewritten by one worker, where they have not been before: they all import the same.

    To rewrite them takes more than half of a collection.
    """
    with one_at_a_time(str(collector.path)) if isinstance(collector, pytest.Module) else contextlib.nullcontext():
        return (yield)


def pytest_collection_finish() -> None:
    """Leave what was collected out of all garbage collections to come: it stays until the end."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = _unfreeze_and_note  # to ask whether something is frozen takes 30 ms, after each test


def _unfreeze_and_note(unfreeze: Callable[[], None] = gc.unfreeze) -> None:
    unfreeze()
    _thawed.append(True)


@pytest.fixture(autouse=True)
def still_frozen() -> Iterator[None]:
    """A server of several models that a test has in this process has all of it looked through again when it ends."""
    yield
    if _thawed:
        _thawed.clear()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test with the others, or alone: all pass a gate into a room, and who wants it empty keeps the gate shut."""
    is_alone = item.get_closest_marker("alone") is not None
    with open(f"{DOOR}-gate", "w") as gate, open(f"{DOOR}-room", "w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        if not is_alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:  # closing would not do where a child has the files too
            fcntl.flock(room, fcntl.LOCK_UN)
            fcntl.flock(gate, fcntl.LOCK_UN)
