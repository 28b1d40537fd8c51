"""The ledger between real processes: who asks first has it, who dies gives it back; and the engine asks it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_run import BudgetError, ModelConfig
from edge_run.base.units import GIB, MIB
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import MARGIN_BYTES, Promised, process_memory
from edge_run.runtime.engine import engine as engine_module
from edge_run.runtime.engine.engine import Engine
from kit_models import streamed
from program import Program, begin, ending, next_line

WAIT_S = 30
ASK = """
    import os, subprocess, sys, time
    from pathlib import Path
    from edge_run.base.errors import BudgetError
    from edge_run.base.units import GIB
    from edge_run.devices.host.ledger import Ledger

    folder, needed_bytes, then = Path(sys.argv[1]), int(sys.argv[2]) * GIB, sys.argv[3]
    ledger = Ledger(folder, lambda promised_bytes: 10 * GIB - promised_bytes(None))
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        grant = ledger.grant(needed_bytes, f"{then}.gguf", 0)
    except BudgetError as error:
        print(f"refused: {error}", flush=True)
        sys.exit()
    if then == "forks" and os.fork() == 0:
        grant.close()  # not the child's
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    if then == "spawns":
        print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False).pid, flush=True)
    if then != "forks":
        print("granted", flush=True)
    sys.stdin.readline()
"""


class Asker:
    """A process that asks for a budget when it is told to."""

    def __init__(self, folder: Path, needed_gib: int, then: str = "waits") -> None:
        program = Program(["-c", str(folder), str(needed_gib), then], source=textwrap.dedent(ASK))
        self.process = begin(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "ready"

    def tell(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def read(self) -> str:
        return next_line(self.process).strip()

    def ask(self) -> str:
        self.tell()
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[..., Asker]]:
    askers: list[Asker] = []

    def start(*arguments: Any) -> Asker:
        askers.append(Asker(tmp_path, *arguments))
        return askers[-1]

    yield start
    for asker in askers:
        asker.kill()


def test_of_processes_that_ask_at_once_those_get_it_for_whom_there_is_room(ask: Callable[..., Asker]) -> None:
    """Five times 4 of 10 GiB: two. The refused ones are told who has it."""
    askers = [ask(4) for _ in range(5)]
    for asker in askers:
        asker.tell()
    answers = [asker.read() for asker in askers]
    winners = [asker.process.pid for asker, answer in zip(askers, answers, strict=True) if answer == "granted"]
    assert len(winners) == 2
    for answer in answers:
        if answer != "granted":
            assert all(f"4.00 GiB to process {pid} (waits.gguf)" in answer for pid in winners)


def test_a_killed_process_gives_its_budget_back_at_once(ask: Callable[..., Asker], tmp_path: Path) -> None:
    one, two = ask(8), ask(8)
    assert one.ask() == "granted"
    assert two.ask().startswith("refused")
    one.kill()
    assert Ledger(tmp_path).runs() == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert ask(8).ask() == "granted"


def test_a_stopped_process_keeps_its_budget(ask: Callable[..., Asker], tmp_path: Path) -> None:
    one = ask(8)
    assert one.ask() == "granted"
    one.process.send_signal(signal.SIGSTOP)
    (run,) = Ledger(tmp_path).runs()
    assert (run.pid, run.models, run.granted_bytes) == (one.process.pid, ("waits.gguf",), 8 * GIB)
    assert 0 < run.held_bytes < GIB


@pytest.mark.parametrize("how", ["forks", "spawns"])
def test_children_neither_hold_nor_release_their_parents_budget(
    how: str, ask: Callable[..., Asker], tmp_path: Path
) -> None:
    """Locks of flock(2) are inherited: a child that outlives its parent must not keep the parent's alive."""
    parent = ask(8, how)
    child = int(parent.ask())
    try:
        assert [run.pid for run in Ledger(tmp_path).runs()] == [parent.process.pid]
        parent.kill()
        os.kill(child, 0)
        assert Ledger(tmp_path).runs() == []
        assert ask(8).ask() == "granted"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_that_a_child_of_other_code_keeps_counts_for_nothing(
    ask: Callable[..., Asker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that C code forked was not told to let go of it; here it is this process that has the file's lock."""
    import fcntl

    parent = ask(8)
    assert parent.ask() == "granted"
    (path,) = tmp_path.glob("run-*")
    with path.open("rb") as file:
        parent.kill()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert Ledger(tmp_path).runs() == []
    assert not path.exists()


# The engine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives this process a ledger of its own, on a machine where it may hold so much."""

    def set_free(free_bytes: int) -> None:
        def available_bytes(promised_bytes: Promised = lambda group: 0) -> int:
            return free_bytes - promised_bytes(None)

        monkeypatch.setattr(engine_module, "Ledger", lambda: Ledger(tmp_path, available_bytes))
        monkeypatch.setattr("edge_run.devices.host.memory.available_bytes", available_bytes)

    return set_free


OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}


def items_bytes(engine: Engine) -> int:
    return sum(item.size_bytes for item in engine.plan.items)


@pytest.mark.parametrize("mode", ["resident", "streamed", "llama.cpp"])
def test_an_open_model_is_in_the_ledger_with_what_its_plan_takes(
    mode: str, kit: Path, grown: Path, tmp_path: Path, machine: Callable[[int], None]
) -> None:
    """llama.cpp's own loader keeps no budget: it is not."""
    machine(20 * GIB)
    backend = "llama.cpp" if mode == "llama.cpp" else "auto"
    options = streamed() if mode == "streamed" else OPTIONS
    engine = Engine.open(grown if mode == "streamed" else kit, ModelConfig(**options, backend=backend))
    assert engine.plan.mode == mode
    runs = Ledger(tmp_path).runs()
    engine.close()
    assert Ledger(tmp_path).runs() == []
    if mode == "llama.cpp":
        assert runs == []
    else:
        assert [(run.pid, run.granted_bytes) for run in runs] == [(os.getpid(), items_bytes(engine))]
        assert len(runs[0].models) == 1


def test_a_budget_beyond_what_is_free_is_refused_only_where_it_is_needed(
    kit: Path, grown: Path, machine: Callable[[int], None]
) -> None:
    machine(process_memory().resident_bytes + 100 * MIB)
    small = Engine.open(kit, ModelConfig(**OPTIONS, memory=50 * GIB))
    assert small.plan.mode == "resident"
    small.close()
    with pytest.raises(BudgetError, match=r"grown\.gguf: the plan needs .* free for it; lower memory= to at most"):
        Engine.open(grown, ModelConfig(**OPTIONS, memory=50 * GIB))


def test_the_budget_that_a_refusal_advises_works(
    kit: Path, grown: Path, tmp_path: Path, ask: Callable[..., Asker], machine: Callable[[int], None]
) -> None:
    other = ask(1)
    assert other.ask() == "granted"
    machine(process_memory().resident_bytes + GIB + 80 * MIB)
    options = {**streamed(), "memory": 10 * GIB}
    with pytest.raises(BudgetError, match=rf"1\.00 GiB to process {other.process.pid} \(waits\.gguf\)") as caught:
        Engine.open(grown, ModelConfig(**options))
    advised = caught.value.found_bytes // MIB * MIB
    engine = Engine.open(grown, ModelConfig(**{**options, "memory": advised}))
    assert engine.plan.mode == "streamed"
    engine.close()


def test_the_default_budget_leaves_what_others_were_promised(
    kit: Path, ask: Callable[..., Asker], machine: Callable[[int], None]
) -> None:
    machine(20 * GIB)
    alone = Engine.open(kit, ModelConfig(**OPTIONS))
    alone.close()
    other = ask(8)
    assert other.ask() == "granted"
    beside = Engine.open(kit, ModelConfig(**OPTIONS))
    beside.close()
    assert 7.4 * GIB < alone.budget_bytes - beside.budget_bytes < 8 * GIB
    assert alone.budget_bytes <= 20 * GIB - MARGIN_BYTES


def test_two_models_in_one_process_open_in_what_both_take(
    grown: Path, tmp_path: Path, machine: Callable[[int], None]
) -> None:
    """Also while the first is still being read: no budget is refused for being counted twice."""
    before = process_memory().resident_bytes
    machine(before + 380 * MIB)
    first = Engine.open(grown, ModelConfig(**OPTIONS, memory=10 * GIB))
    second = Engine.open(grown, ModelConfig(**OPTIONS, memory=10 * GIB))
    assert (first.plan.mode, second.plan.mode) == ("resident", "resident")
    (run,) = Ledger(tmp_path).runs()
    assert before + 2 * 120 * MIB < run.granted_bytes <= before + 380 * MIB
    with pytest.raises(BudgetError, match=r"to this process \(grown\.gguf, grown\.gguf\)"):
        Engine.open(grown, ModelConfig(**OPTIONS, memory=10 * GIB))
    first.close()
    third = Engine.open(grown, ModelConfig(**OPTIONS, memory=10 * GIB))
    for engine in (second, third):
        engine.close()
    assert Ledger(tmp_path).runs() == []


def test_a_killed_run_is_forgotten(kit: Path, tmp_path: Path) -> None:
    code = f"""
        import time
        from pathlib import Path
        from edge_run.base.config import ModelConfig
        from edge_run.devices.host.ledger import Ledger
        from edge_run.runtime.engine import engine
        engine.Ledger = lambda: Ledger(Path({json.dumps(str(tmp_path))}))
        engine.Engine.open(Path({json.dumps(str(kit))}), ModelConfig(context_tokens=256, threads=1))
        print("open", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with ending(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert next_line(process) == "open\n"
        assert [run.models for run in Ledger(tmp_path).runs()] == [(kit.name,)]
    started = time.monotonic()
    assert Ledger(tmp_path).runs() == []
    assert time.monotonic() - started < 20
