"""Real processes that go wrong: a worker that hands over NaN, a coordinator that has others write beyond a batch."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import mesh_rogue
from edge_run.base.config import ModelConfig
from edge_run.base.mesh_status import MeshUse
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.mesh import coordinator, device_group
from edge_run.runtime.mesh.engine import open_mesh_engine
from edge_run.runtime.mesh.messages import Decode, command_parts
from in_child import in_child
from mesh_faults import OPTIONS, greedy
from mesh_processes import mesh_of, round_robin
from mosquitto import PROGRAM
from program import MESH, fork_from_here
from tiny_models import make_model

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="mosquitto is not installed")


@in_child
def test_a_worker_that_hands_over_nan_is_left_out_and_one_that_was_sent_4000_branches_lives(
    folder: Path, tmp_path: Path
) -> None:
    fork_from_here(MESH)
    path = make_model("llama", folder)
    config = ModelConfig(memory="4GiB", **OPTIONS)
    alone = Engine.open(path, config)
    wanted, _ = greedy(alone, 20)
    alone.close()
    coordinator.plan_ring = round_robin
    with mesh_of(tmp_path, path, ["b"]) as mesh:
        rogue = mesh.spawn("c", script=Path(mesh_rogue.__file__))
        rogue.wait_ready()
        here = mesh.join()
        mesh.wait_for(here, 2)

        def said_over_the_mesh() -> MeshUse:
            """Return how what is wanted was said."""
            with closing(open_mesh_engine(path, dataclasses.replace(config, chunk_bytes=16384), here)) as engine:
                said, _ = greedy(engine, 20)
                assert said == wanted
                assert engine.mesh_use is not None
                return engine.mesh_use

        use = said_over_the_mesh()
        assert list(use.left_out) == [rogue.node]
        assert mesh.workers["b"].node in [node.node for node in use.nodes]
        rogue.end()

        wild = np.array([1, 0, 0, 1, 4000, *[0x41414141] * 4000], np.int32).tobytes()
        device_group.command_parts = lambda command: (
            [memoryview(wild)] if isinstance(command, Decode) else command_parts(command)
        )
        use = said_over_the_mesh()
        assert mesh.workers["b"].node in use.left_out
        assert mesh.workers["b"].process.poll() is None, "the worker lives"
        assert "a command decode of" in mesh.workers["b"].log.read_text()
