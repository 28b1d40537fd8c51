"""What the integration tests share: models, and the command line as somebody has it who configured nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from at_once import OPTIONS
from edge_run import Model, inflate
from edge_run.base.files.folders import cache_folder
from edge_run.base.units import MIB
from edge_run.runtime.inspection import launcher
from edge_run.runtime.processes import cell
from edge_run.runtime.processes.child_process import QUIET, start_command
from json_grammars import Takes, with_vocabulary
from kit_models import KIT
from mosquitto import Mosquitto, mosquitto
from program import Mother, Program, Result, begin, fresh_environment, run_anew, run_program
from screens import Screen
from served import EXACTLY, TEMPLATE, Served, served
from tiny_models import make_model

if TYPE_CHECKING:
    import openai

    from mesh_table import Table

CELL_MODULES = (
    *("edge_run.runtime.processes.cell_child", "edge_run.runtime.generation.template_jobs"),
    *(f"edge_run.runtime.grammars.{name}" for name in ("jobs", "schema_grammar", "schema_converter")),
)


@pytest.fixture(scope="session", autouse=True)
def forked_children(shared_folders: None) -> Iterator[None]:
    """Let the processes that open a model file first for this one, and its cells, be forks that have their modules.

    To start one anew takes longer than what it does then. Those of programs that tests start, and of tests in children,
    are started anew, and so is what a test has started in place of one.
    """
    launched, quiet = launcher._START, {**os.environ, **QUIET}
    inspectors, cells = Mother.start(("forked_inspector",), quiet), Mother.start(("forked_cell", *CELL_MODULES), quiet)

    def inspector(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        if command != start_command(launched):
            return subprocess.Popen(command, **how)
        return begin(Program(["-c"], source=launched), inspectors, **how)

    def a_cell(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        codes = [cell._START.format(module, *how["pass_fds"]) for module in CELL_MODULES]
        code = next((one for one in codes if command == start_command(one)), None)
        if code is None:
            return subprocess.Popen(command, **how)
        return begin(Program(["-c"], source=code), cells, **how)

    with pytest.MonkeyPatch.context() as patch, contextlib.closing(inspectors), contextlib.closing(cells):
        patch.setattr(launcher, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": inspector}))
        patch.setattr(cell, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": a_cell}))
        yield


@pytest.fixture(scope="session")
def kit() -> Path:
    """The bundled model, 7 MB: it fits every budget."""
    return KIT


@pytest.fixture
def model_of_two(kit: Path) -> Iterator[Model]:
    """The same, opened for two answers at once."""
    with Model(kit, **OPTIONS, sequences=2) as model:
        yield model


@pytest.fixture(scope="session")
def grown(shared_folders: None) -> Path:
    """The bundled model grown to 120 MB, 12 layers: with the options of `streamed` it streams. Tests only read it.

    All workers have the same, so that what one of them finds out about the file the others know.
    """
    path = Path(os.environ["TINY_MODELS"]) / "grown" / "grown.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return path if path.exists() else inflate(KIT, path, 120 * MIB, layers=12)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head of a network that is split, beside its tail."""
    from vision_models import make_bundle

    return make_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this module are made."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def llama(folder: Path) -> Path:
    """A tiny model of random weights."""
    return make_model("llama", folder)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of a prompt cache."""
    return tmp_path / "kept"


@pytest.fixture(scope="session")
def server(kit: Path) -> Iterator[Served]:
    """A server of the bundled model, whose texts are those of `model`."""
    with served(kit, *EXACTLY, "--chat-template", TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def model(kit: Path) -> Iterator[Model]:
    """The bundled model, with the options that `server` has."""
    with Model(kit, context_tokens=512, threads=1, exact=True, chat_template=TEMPLATE) as model:
        yield model


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    """A client of OpenAI's that asks `server`."""
    import openai

    assert server.process.poll() is None, server.said
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none needed", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    """A client that asks `server`."""
    assert server.process.poll() is None, server.said
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment without settings of the user's, and with a home of its own."""
    home = tmp_path / "home"
    home.mkdir()
    return fresh_environment(home, TERM="dumb")


@pytest.fixture
def known_models(environment: dict[str, str]) -> None:
    """Let the home of `environment` have what other tests found out about model files, and give them what is new.

    To find that out, in a process of its own, takes longer than the rest of a short command. That it is found out, and
    how, has tests of its own (`test_inspection.py`).
    """
    known, own = cache_folder() / "inspected", Path(environment["HOME"], ".cache", "edge-run")
    known.mkdir(parents=True, exist_ok=True)
    own.mkdir(parents=True)
    (own / "inspected").symlink_to(known)


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Callable[..., Result]:
    """Run the command line in a folder of its own."""

    def run(*arguments: object, stdin: str = "", is_begun: bool = True, **settings: str) -> Result:
        """is_begun: in a process that has been started already, and has no settings of Python's."""
        run = run_program if is_begun else run_anew
        return run(*arguments, text=stdin, environment={**environment, **settings}, folder=tmp_path)

    return run


@pytest.fixture
def screen(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Screen]]:
    """Run the command line at a terminal of its own, which ends with the test."""
    screens: list[Screen] = []

    def begin(*arguments: object, **settings: str) -> Screen:
        screens.append(Screen({**environment, **settings}, *arguments, folder=tmp_path))
        return screens[-1]

    yield begin
    for one in screens:
        one.close()


@pytest.fixture(scope="module")
def takes() -> Iterator[Takes]:
    """Return whether a grammar of a JSON schema takes a text as a whole answer."""
    with with_vocabulary() as found:
        yield found


@pytest.fixture(scope="module")
def traced_here() -> Iterator[None]:
    """Trace networks of ours in this process; that strangers' have one of their own tests `test_split_inspect.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cell, "_why_here", lambda: "these networks are no stranger's")
        yield


@pytest.fixture
def patient_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members of a mesh, and brokers of theirs, have the time that a busy machine needs."""
    from edge_run.devices.broker import embedded
    from edge_run.devices.presence import membership
    from patience import PATIENT

    monkeypatch.setattr(membership, "QUICK", PATIENT)
    monkeypatch.setattr(embedded, "START_S", 60.0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    """A real mosquitto; without one, the test is skipped."""
    with mosquitto(tmp_path) as one:
        yield one


@pytest.fixture
def table(tmp_path: Path, broker: Mosquitto) -> Iterator[Table]:
    """A cluster at `broker`, whose members are those that a test opens or starts."""
    from mesh_lists import Members
    from mesh_table import Table

    one = Table(tmp_path, Members(broker.url))
    with one.stack:
        yield one
