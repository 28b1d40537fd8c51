"""Devices of a run on a mesh that hang, read for long, join, were started anew or silent, or lack the model."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import DeviceLost, MeshError
from edge_run.base.fields import Document
from edge_run.base.mesh import HasLeft, MeshOptions
from edge_run.runtime.mesh import coordinator, device_group, failover
from edge_run.runtime.mesh import orders as run_orders
from edge_run.runtime.mesh import run as mesh_run
from edge_run.runtime.mesh.engine import open_mesh_engine
from fake_mesh import Hub
from in_child import in_child
from mesh_processes import round_robin
from mesh_runs import CHUNK_BYTES, OPTIONS, Run, alone, greedy, running
from tiny_models import make_model
from waiting import until


@in_child
def test_a_worker_that_hangs_is_done_without(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    run_orders.STATUS_TIMEOUT_S = 1.0
    with running(path) as run:
        freed = threading.Event()
        stuck = run.workers["b"]

        def hang(i: int) -> None:
            if i == 4:
                device_group.LEAST_DEADLINE_S, device_group.PATIENCE = 1.0, 0.0  # from now on
                assert stuck._engine is not None
                send = stuck._runs.run.transport.send  # type: ignore[union-attr]
                stuck._runs.run.transport.send = lambda *a: (freed.wait(80), send(*a))[1]  # type: ignore[union-attr]
                stuck._runs.run.transport.place = "computing for ever"  # type: ignore[union-attr]

        started = time.monotonic()
        assert greedy(run.engine, at=hang) == wanted
        assert time.monotonic() - started < 60
        assert any("in time" in line for line in run.said)
        freed.set()


@in_child
def test_what_a_worker_does_is_shown_to_others(folder: Path) -> None:
    """Home Assistant is shown the same."""
    path = make_model("llama", folder)
    with running(path) as run:
        greedy(run.engine)
        loads = run.hub.members["b"].loads
        until(lambda: len(loads) >= 2)
        assert loads[0] == {"model": path.name, "tokens_per_s": 0.0}
        assert loads[1]["tokens_per_s"] > 0  # type: ignore[operator]


@in_child
def test_tokens_that_are_computed_again_are_shown_to_nobody(folder: Path) -> None:
    path = make_model("llama", folder)
    counted: list[int] = []
    with running(path) as run:
        run.workers["c"]._runs._shown.count = counted.append  # type: ignore[method-assign]
        greedy(run.engine, at=lambda i: run.hub.kill("b") if i == 10 else None)
        use = run.engine.mesh_use
        assert use is not None
        assert use.recoveries == 1
        assert 16 <= sum(counted) <= 17, "of the pass that b died in, its first part may be what was counted"


@in_child
def test_a_worker_that_reads_its_weights_in_the_first_passes_is_waited_for(folder: Path) -> None:
    """Also where the first pass reads little of them, as one of few tokens does of a mixture."""
    path = make_model("llama", folder)
    wanted = alone(path)
    device_group.LEAST_DEADLINE_S, device_group.PATIENCE = 1.5, 0.0
    mesh_run.reading_s = lambda *plan: 8.0
    with running(path) as run:
        spent = itertools.count()

        def read(source: str, target: str, header: Document) -> None:
            if source == "b" and header["kind"] == "activation" and next(spent) in (2, 9):
                time.sleep(2.0)

        run.hub.on_send = read
        assert greedy(run.engine) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert use.recoveries == 0, run.said
        assert next(spent) > 9
        run.hub.on_send = lambda *a: None
        run.workers["b"]._runs.run.transport.send = lambda *a: time.sleep(6)  # type: ignore[union-attr]
        group = run.engine.front._run._group  # type: ignore[attr-defined]
        group._reading_s = min(group._reading_s, 3.0)  # what is left of its patience
        started = time.monotonic()
        run.engine.front.rewind(0, 0)
        assert greedy(run.engine) == wanted
        assert time.monotonic() - started < 60, "but not for ever"


@in_child
def test_a_device_that_joins_gets_its_part_when_a_conversation_begins(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    with running(path, "b") as run:
        run.workers["d"] = run.join("d")
        assert greedy(run.engine) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert {node.node for node in use.nodes} == {"a", "b", "d"}


@in_child
def test_a_device_that_was_started_anew_is_asked_at_once(folder: Path) -> None:
    """Its loss and its new incarnation may be heard together, and that its old connection broke after both."""
    path = make_model("granite", folder)
    wanted = alone(path)
    with running(path) as run:
        assert greedy(run.engine) == wanted
        run.hub.kill("b")
        run.workers["b"].close()
        run.workers["b"] = run.join("b")
        run.engine.front.rewind(0, 0)
        assert greedy(run.engine) == wanted
        assert {node.node for node in run.engine.mesh_use.nodes} == {"a", "b", "c"}


@in_child
def test_a_device_whose_link_was_silent_for_a_moment_is_asked_again(folder: Path) -> None:
    """Nobody else lost it, so it is not announced anew."""
    path = make_model("llama", folder)
    wanted = alone(path)
    with running(path) as run:
        loss = DeviceLost("the connection broke", node="b")
        for number in range(1, failover.MOST_MISFITS + 2):
            assert greedy(run.engine, at=lambda i: run.mesh.put(loss) if i == 5 else None) == wanted
            assert {node.node for node in run.engine.mesh_use.nodes} == {"a", "c"}
            until(lambda: run.workers["b"]._engine is None)  # though it was given up as gone
            run.engine.front.rewind(0, 0)
            assert greedy(run.engine) == wanted
            is_back = number <= failover.MOST_MISFITS
            assert {node.node for node in run.engine.mesh_use.nodes} == ({"a", "b", "c"} if is_back else {"a", "c"})
            run.engine.front.rewind(0, 0)


@in_child
def test_who_has_left_its_mesh_goes_on_alone_and_blames_nobody(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    with running(path) as run:

        def leave(*given: object, **more: object) -> Document:
            run.mesh.lead = leave  # type: ignore[assignment]
            raise HasLeft("mesh: the data link ended (on purpose); this device has left, start it anew")

        def end_link(i: int) -> None:
            if i == 5:
                run.mesh.order = leave  # type: ignore[method-assign]
                run.mesh.put(DeviceLost("the connection broke", node="b"))

        assert greedy(run.engine, at=end_link) == wanted
        assert any(line.endswith("start it anew: this device goes on alone") for line in run.said), run.said
        assert not any("left out" in line for line in run.said), run.said
        use = run.engine.mesh_use
        assert use is not None
        assert not use.left_out


@in_child
def test_a_run_whose_own_link_ends_goes_on_alone(folder: Path) -> None:
    """What is heard of it first may be events, or a message that is to be sent or waited for."""
    path = make_model("llama", folder)
    wanted = alone(path)
    for closed in ((), ("send", "receive")):
        with running(path) as run:

            def leave(*given: object, **more: object) -> Document:
                raise HasLeft("mesh: the data link ended (on purpose); this device has left, start it anew")

            def close(*given: object, **more: object) -> None:
                raise MeshError("data link: is closed")

            def end(i: int, run: Run = run, closed: tuple[str, ...] = closed) -> None:
                for name in ("wait", "lead", "order", "publish_plan", *closed) if i == 5 else ():
                    setattr(run.mesh, name, close if name in closed else leave)

            assert greedy(run.engine, at=end) == wanted
            assert any(line.endswith("start it anew: this device goes on alone") for line in run.said), run.said
            assert not any("left out" in line or "another device leads" in line for line in run.said), run.said
            run.engine.front.rewind(0, 0)
            assert greedy(run.engine) == wanted
            assert run.engine.mesh_use is not None
            assert not run.engine.mesh_use.left_out


@in_child
def test_a_device_without_the_model_or_with_other_kernels_is_left_out(folder: Path) -> None:
    path, other = make_model("llama", folder), make_model("llama", folder / "other", seed=1)
    wanted = alone(path)
    real = coordinator.differing
    hub_run = Run.__new__(Run)
    hub_run.hub, hub_run.path, hub_run.said = Hub(), path, []
    coordinator.plan_ring = round_robin
    hub_run.workers = {"b": hub_run.join("b", other), "c": hub_run.join("c")}
    coordinator.differing = lambda ours, theirs: real({**ours, "kernels": "AVX9"}, theirs)
    hub_run.mesh = hub_run.hub.join("a")
    hub_run.engine = open_mesh_engine(
        path,
        ModelConfig(memory="4GiB", chunk_bytes=CHUNK_BYTES, **OPTIONS),
        hub_run.mesh,
        MeshOptions(say=hub_run.said.append),
    )
    try:
        use = hub_run.engine.mesh_use
        assert use is not None
        assert "copy the same file" in use.left_out["b"]
        assert "kernels" in use.left_out["c"]
        assert greedy(hub_run.engine) == wanted
    finally:
        hub_run.close()
