"""Devices of a mesh that refuse, lack room, gave up or read their file first: who is asked again, and holds what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, DeviceLost, MeshError
from edge_run.base.fields import Document
from edge_run.base.units import GIB
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_ring import Hops
from edge_run.runtime.fetch.fingerprint import Fingerprint
from edge_run.runtime.mesh import coordinator, failover
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.slice import Share, Transport
from edge_run.runtime.worker import files, search
from edge_run.runtime.worker import worker as worker_module
from edge_run.runtime.worker.worker import Worker
from in_child import in_child
from mesh_processes import round_robin
from mesh_runs import Run, alone, greedy, running
from tiny_models import make_model
from waiting import until


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
                until(lambda: worker._runs.run is None and worker._runs._busy_with is None)
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
def test_a_device_at_another_address_and_one_started_anew_between_two_plans_take_part_at_once(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)

    def nodes_of_a_text(at: Callable[[int], None] = lambda i: None) -> list[str]:
        run.engine.front.rewind(0, 0)
        assert greedy(run.engine, at=at) == wanted
        use = run.engine.mesh_use
        assert use is not None
        return [node.node for node in use.nodes]

    def end_b_and_start_c_anew(i: int) -> None:
        if i == 5:
            run.hub.kill("b")
            run.workers["c"].close()
            run.hub.kill("c")
            run.workers["c"] = run.join("c")

    with running(path, before=lambda hub: hub.unreached.update({("a", "b"): "nothing listens there"})) as run:
        run.mesh.lead = lambda **given: run.mesh.epoch  # type: ignore[method-assign]  # as where nobody else led
        run.hub.unreached.clear()
        assert nodes_of_a_text() == ["a", "c"], "it is not asked for each text"
        run.hub.members["b"].move("tcp://10.0.0.2:5000")
        assert nodes_of_a_text() == ["a", "b", "c"]
        before = run.engine.mesh_use
        assert nodes_of_a_text(end_b_and_start_c_anew) == ["a", "c"], run.said
        after = run.engine.mesh_use
        assert before is not None
        assert after is not None
        assert (after.recoveries, after.left_out) == (before.recoveries + 1, {})


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
        until(lambda: run.workers["c"]._engine is None)


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
        assert time.monotonic() - started < 25, "what stops it would be waited for for 30 s"

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
        assert time.monotonic() - started < 25
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
