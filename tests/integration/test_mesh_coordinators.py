"""A coordinator that was frozen or cut off for a while: what it finds when it comes back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edge_run.base.errors import DeviceLost, MeshError
from edge_run.base.fields import Document
from edge_run.base.mesh import Unled
from edge_run.runtime.mesh import device_group
from in_child import in_child
from mesh_runs import alone, greedy, running
from tiny_models import make_model


@pytest.mark.parametrize("how", ["it hears that", "a worker tells it"])
@in_child
def test_who_was_superseded_for_a_while_has_all_devices_again(how: str, folder: Path) -> None:
    """As after a freeze: another run had the workers meanwhile, and closed the model there."""
    path = make_model("granite", folder)
    wanted = alone(path)
    with running(path) as run:

        def other_run() -> None:
            for worker in run.workers.values():
                worker.handle("x", run.mesh.epoch + 1, {"order": "close"})
            run.mesh.events.put(Unled(run.mesh.epoch))

        def refuse(node: str, epoch: int, order: Document) -> Document:
            run.hub.members["c"].handler = run.workers["c"].handle
            other_run()
            raise MeshError(f"node c: epoch {epoch} is past: another coordinator has a later one", node="c")

        def supersede(i: int) -> None:
            if i == 6 and how == "it hears that":
                other_run()
            elif i == 6:
                run.hub.members["c"].handler = refuse
                run.hub.kill("b")

        assert greedy(run.engine, at=supersede) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert not use.left_out
        assert {node.node for node in use.nodes} == ({"a", "b", "c"} if how == "it hears that" else {"a", "c"})


@pytest.mark.parametrize("when", ["between passes", "in a pass"])
@in_child
def test_a_coordinator_that_was_away_for_a_moment_has_those_back_who_gave_it_up(when: str, folder: Path) -> None:
    path = make_model("granite", folder)
    wanted = alone(path)
    with running(path) as run:

        def give_up(node: str) -> None:
            run.hub.members[node].put(DeviceLost("a: was silent", node="a"))

        def on_send(source: str, target: str, header: Document) -> None:
            if (source, target, header.get("kind"), header.get("number")) == ("b", "c", "activation", 8):
                run.hub.on_send = lambda source, target, header: None
                give_up("c")

        def freeze(i: int) -> None:
            if i == 6 and when == "between passes":
                for node in "bc":
                    give_up(node)
            elif i == 4 and when == "in a pass":
                run.hub.on_send = on_send

        device_group.LEAST_DEADLINE_S = 80.0
        started = time.monotonic()
        assert greedy(run.engine, at=freeze) == wanted
        assert time.monotonic() - started < device_group.LEAST_DEADLINE_S / 2
        use = run.engine.mesh_use
        assert use is not None
        assert {node.node for node in use.nodes} == {"a", "b", "c"}
        assert use.recoveries == 1


@in_child
def test_the_end_of_a_lease_holds_up_nobody_who_goes_on_alone(folder: Path) -> None:
    """As on a device that was cut off: it has lost the others, says again what was said, and then its lease ends."""
    path = make_model("granite", folder)
    wanted = alone(path)
    with running(path) as run:

        def end_lease(text: str) -> None:
            run.said.append(text)
            if "computed again on 1 devices" in text:
                run.mesh.events.put(Unled(run.mesh.epoch))

        def cut_off(i: int) -> None:
            if i == 6:
                run.on_say = end_lease
                for node in "bc":
                    run.hub.kill(node)

        assert greedy(run.engine, at=cut_off) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert {node.node for node in use.nodes} == {"a"}
        assert run.mesh.events.empty(), "it was heard"
