"""A real process without the model is killed while it fetches, and goes on where it was when it is started again."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

import mesh_runs
from edge_run.base.config import ModelConfig
from edge_run.base.mesh import MeshOptions, Message, is_worker
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.fetch.exchange import PieceExchange
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh.engine import open_mesh_engine
from in_child import in_child
from mesh_processes import MeshOfProcesses, mesh_of, round_robin
from mosquitto import PROGRAM
from program import MESH, fork_from_here
from waiting import until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="mosquitto is not installed")

OPTIONS = {"context_tokens": 256, "micro_batch_tokens": 32, "threads": 1, "check_file": False}
PIECE_S = 0.012
KILLED_AT = 150  # pieces, two seconds after the first, so that there is something to go on with
greedy = partial(mesh_runs.greedy, tokens=6, prompt=[1, 5, 9, 13, 200, 7])


class Giving:
    """Counts the pieces that this process gives, slowly, and kills who gets them."""

    def __init__(self, mesh: MeshOfProcesses) -> None:
        self.count, self.victim = 0, ""
        real = PieceExchange._give

        def give(exchange: PieceExchange, message: Message) -> None:
            time.sleep(PIECE_S)
            self.count += message.header.get("what") == "piece"
            if self.victim and self.count == KILLED_AT:
                mesh.workers[self.victim].kill()
            real(exchange, message)

        PieceExchange._give = give  # type: ignore[method-assign]


@in_child
def test_who_is_killed_while_it_fetches_goes_on_where_it_was(grown: Path, tmp_path: Path) -> None:
    fork_from_here(MESH)
    engine = Engine.open(grown, ModelConfig(memory="4GiB", **OPTIONS))
    wanted = greedy(engine)
    engine.close()
    coordinator.plan_ring = round_robin
    with mesh_of(tmp_path, grown, []) as mesh:
        mesh.spawn("b", fetch="1GiB").wait_ready()
        here = mesh.join()
        mesh.wait_for(here, 1)
        giving = Giving(mesh)
        giving.victim = "b"
        said: list[str] = []
        engine = open_mesh_engine(
            grown, ModelConfig(memory="4GiB", **OPTIONS, chunk_bytes=16384), here, MeshOptions(say=said.append)
        )
        assert greedy(engine) == wanted
        assert engine.mesh_use is not None
        assert len(engine.mesh_use.nodes) == 1
        assert any("fetches" in line for line in said), said
        assert giving.count >= KILLED_AT

        giving.victim, giving.count = "", 0
        mesh.spawn("b", fetch="1GiB").wait_ready()
        until(lambda: any(is_worker(member) for member in here.members()))  # events are the engine's
        engine.front.rewind(0, 0)
        assert greedy(engine) == wanted
        assert len(engine.mesh_use.nodes) == 2, said
        assert giving.count > 0
        layers = sum(len(node.blocks) for node in engine.mesh_use.nodes if node.node != here.node)
        pieces = layers * 10 * 4
        assert giving.count < pieces - 50, (giving.count, pieces)
        engine.close()
