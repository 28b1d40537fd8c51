"""Devices of a run on a mesh that hang, read for long, join, were started anew or silent, or lack the model."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, DeviceLost, MeshError
from edge_run.base.mesh import Document, HasLeft
from edge_run.base.units import GIB
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_ring import Hops
from edge_run.runtime.fetch.fingerprint import Fingerprint
from edge_run.runtime.mesh import coordinator, device_group, failover
from edge_run.runtime.mesh import orders as run_orders
from edge_run.runtime.mesh import run as mesh_run
from edge_run.runtime.mesh.engine import MeshOptions, open_mesh_engine
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.slice import Share, Transport
from edge_run.runtime.worker import files, search
from edge_run.runtime.worker import worker as worker_module
from edge_run.runtime.worker.worker import Worker
from fake_mesh import Hub
from in_child import in_child
from mesh_processes import round_robin
from mesh_runs import CHUNK_BYTES, OPTIONS, Run, alone, greedy, running
from tiny_models import make_model


@in_child
def test_a_worker_that_hangs_is_done_without(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    device_group.LEAST_DEADLINE_S, device_group.PATIENCE = 1.0, 0.0
    run_orders.STATUS_TIMEOUT_S = 1.0
    with running(path) as run:
        freed = threading.Event()
        stuck = run.workers["b"]

        def hang(i: int) -> None:
            if i == 4:
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
        loads, until = run.hub.members["b"].loads, time.monotonic() + 20
        while len(loads) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
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
    mesh_run.reading_s = lambda *plan: 1.5
    with running(path) as run:
        spent = itertools.count()

        def read(source: str, target: str, header: Document) -> None:
            if source == "b" and header["kind"] == "activation" and next(spent) in (2, 9):
                time.sleep(3.0)

        run.hub.on_send = read
        assert greedy(run.engine) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert use.recoveries == 0, run.said
        assert next(spent) > 9
        run.hub.on_send = lambda *a: None
        run.workers["b"]._runs.run.transport.send = lambda *a: time.sleep(6)  # type: ignore[union-attr]
        started = time.monotonic()
        run.engine.front.rewind(0, 0)
        assert greedy(run.engine) == wanted
        assert time.monotonic() - started < 15, "but not for ever"


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
def test_a_device_that_gave_up_and_closed_the_model_meanwhile_opens_it_again(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    with running(path) as run:
        run.mesh.lead = lambda **given: run.mesh.epoch  # type: ignore[method-assign]  # as where nobody else led

        def lose_touch(i: int) -> None:
            if i == 5:
                worker = run.workers["b"]
                run.hub.members["b"].put(DeviceLost("the connection broke", node="a"))
                until = time.monotonic() + 20
                while worker._runs.run is not None:
                    assert time.monotonic() < until
                    time.sleep(0.001)
                worker._close_engine()

        assert greedy(run.engine, at=lose_touch) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert not use.left_out
        assert {node.node for node in use.nodes} == {"a", "b", "c"}


@in_child
def test_a_device_that_refused_takes_part_when_it_was_started_anew_or_some_time_later(folder: Path) -> None:
    """A server's run lasts for weeks: it never took a device back that had refused once."""
    path, other = make_model("llama", folder), make_model("llama", folder / "other", seed=1)
    wanted = alone(path)
    busy = MeshError("another process computes with it now")

    def refuse(node: str, epoch: int, order: Document) -> Document:
        raise busy

    def nodes_of_a_text() -> list[str]:
        run.engine.front.rewind(0, 0)
        assert greedy(run.engine) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert not {node.node for node in use.nodes} & use.left_out.keys()
        return [node.node for node in use.nodes]

    with running(path) as run:
        run.workers["b"].close()
        run.hub.kill("b")
        run.workers["b"] = run.join("b", other)
        assert nodes_of_a_text() == ["a", "c"]
        assert nodes_of_a_text() == ["a", "c"], "it is not asked for each text"
        run.workers["b"].close()
        run.hub.kill("b")
        run.workers["b"] = run.join("b")
        assert nodes_of_a_text() == ["a", "b", "c"]

        run.engine.close()
        run.hub.members["b"].handler = refuse
        run.open()
        assert nodes_of_a_text() == ["a", "c"]
        failover.RETURN_S = 0.0
        run.open_anew()
        assert nodes_of_a_text() == ["a", "c"]
        run.hub.members["b"].handler = run.workers["b"].handle
        run.said.clear()
        assert nodes_of_a_text() == ["a", "b", "c"]
        assert any("a device joined" in line for line in run.said), run.said


@in_child
def test_a_device_without_room_is_asked_a_few_times_alone_and_holds_nothing_then(folder: Path) -> None:
    """Before each text it opened the model anew, and with it whoever the plan did without."""
    path = make_model("llama", folder)
    asked: list[tuple[str, object]] = []
    failover.RETURN_S = 0.0

    def plan_without_d(works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: Hops) -> MeshPlan | None:
        return round_robin(works, [spec for spec in specs if spec.node != "d"], hops)

    def note(run: Run, node: str, *, has_room: bool) -> None:
        def handle(coordinator: str, epoch: int, order: Document) -> Document:
            asked.append((node, order["order"]))
            if order["order"] == "prepare" and not has_room:
                raise MeshError("no room", node=node) from BudgetError("no room")
            return run.workers[node].handle(coordinator, epoch, order)

        run.hub.members[node].handler = handle

    with running(path, "bcd") as run:
        coordinator.plan_ring = plan_without_d
        run.engine.close()
        note(run, "b", has_room=False)
        note(run, "d", has_room=True)
        run.open()
        of_spare = asked.count(("d", "prepare"))
        for _ in range(failover.MOST_MISFITS + 3):
            run.engine.front.rewind(0, 0)
            greedy(run.engine, 1)
            use = run.engine.mesh_use
            assert use is not None
            assert "no room" in use.left_out["b"]
        assert asked.count(("b", "prepare")) == failover.MOST_MISFITS + 1
        assert asked.count(("b", "close")) == asked.count(("b", "prepare"))
        assert asked.count(("d", "prepare")) == of_spare, "the plan does without it, whoever comes back"


@in_child
def test_devices_outside_the_plan_hold_nothing_and_those_of_a_run_that_is_gone_neither(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    chosen = {"a", "b"}
    worker_module.ORPHAN_S = 0.1

    def plan_some(works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: Hops) -> MeshPlan | None:
        return round_robin(works, [spec for spec in specs if spec.node in chosen], hops)

    with running(path) as run:
        run.engine.close()
        coordinator.plan_ring = plan_some
        run.open()
        assert run.workers["c"]._engine is None
        assert greedy(run.engine, 2) == wanted[:2]
        chosen.add("c")
        run.engine.front.rewind(0, 0)
        assert greedy(run.engine, at=lambda i: run.hub.kill("b") if i == 5 else None) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert [node.node for node in use.nodes] == ["a", "c"]
        assert run.workers["c"]._engine is not None
        run.hub.kill("a")
        until = time.monotonic() + 20
        while run.workers["c"]._engine is not None:
            assert time.monotonic() < until
            time.sleep(0.01)


@in_child
def test_a_device_that_reads_its_file_for_the_first_time_says_how_far_it_is(folder: Path) -> None:
    """It may take longer than an order."""
    path = make_model("llama", folder)
    wanted = alone(path)
    real, files.LOOK_S = search.fingerprint, 0.001

    def slow(paths: Sequence[Path], cache: Path, check: Callable[[], None]) -> Fingerprint:
        for _ in range(5):
            time.sleep(0.02)
            check()
        return real(paths, cache, check)

    search.fingerprint = slow
    with running(path) as run:
        assert any(f"name of b reads {path.name} for the first time, to know it: " in line for line in run.said), (
            run.said
        )
        assert greedy(run.engine) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert {node.node for node in use.nodes} == {"a", "b", "c"}


@in_child
def test_a_worker_is_closed_at_once_while_it_reads_a_file_or_waits_for_a_header(folder: Path) -> None:
    path, prepares = make_model("llama", folder), list[Document]()

    def endless(paths: Sequence[Path], cache: Path, check: Callable[[], None]) -> Fingerprint:
        while True:
            check()
            time.sleep(0.01)

    with running(path, "b") as run:
        handle = run.workers["b"].handle
        run.engine.close()
        run.hub.members["b"].handler = lambda node, epoch, order: (prepares.append(order), handle(node, epoch, order))[
            1
        ]
        run.open()
        epoch = run.mesh.epoch
        run.engine.close()
        search.fingerprint = endless
        assert "reading" in handle("a", epoch, prepares[0])
        started = time.monotonic()
        run.workers["b"].close()
        assert time.monotonic() - started < 10

        config = ModelConfig(memory="4GiB", threads=1, check_file=False, cache_folder=folder / "d")
        fetcher = Worker(run.hub.join("d"), [], config, GIB)
        fetcher.start()
        refusals: list[MeshError] = []

        def prepare() -> None:
            try:
                fetcher.handle("a", epoch, prepares[0])
            except MeshError as error:
                refusals.append(error)

        order = threading.Thread(target=prepare)
        order.start()
        while not fetcher._at_work.locked():
            time.sleep(0.001)
        started = time.monotonic()
        fetcher.close()
        order.join()
        assert time.monotonic() - started < 10
        assert "takes no more part" in str(refusals[0])


@in_child
def test_a_device_whose_memory_was_taken_meanwhile_is_planned_with_again(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    assign = SliceEngine.assign
    taken = ["b", "a"]

    def tight(engine: SliceEngine, share: Share, transport: Transport) -> None:
        if share.node in taken:
            taken.remove(share.node)
            raise BudgetError("memory budget 4 GiB: 1 GiB is free", found_bytes=GIB, minimum_bytes=2 * GIB)
        assign(engine, share, transport)

    SliceEngine.assign = tight  # type: ignore[method-assign]
    with running(path) as run:
        assert greedy(run.engine) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert not use.left_out
        assert {node.node for node in use.nodes} == {"a", "b", "c"}
        assert any(line.startswith("name of b has less room than it seemed: memory") for line in run.said), run.said
        rooms = {n: s.memory_bytes for n, s in run.engine.front._run._coordinator.specs.items()}  # type: ignore[attr-defined]
        assert max(rooms["a"], rooms["b"]) < rooms["c"]


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
