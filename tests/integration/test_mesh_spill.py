"""A context on a mesh that has no room in the memory of all devices together: each has a file for its own layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.units import GIB
from edge_run.runtime.mesh import coordinator, offers
from edge_run.runtime.mesh.coordinator import plan_ring
from edge_run.runtime.planning import spill_terms
from edge_run.runtime.slices.engine import SliceEngine
from in_child import in_child
from mesh_runs import CHUNK_BYTES, OPTIONS, Run, alone, greedy, running
from tiny_models import make_model

LONG = {**OPTIONS, "context_tokens": 1 << 18}
SHARE = 0.45  # of all keys and values, for which a device has room: those of one of the four layers


def memory_for(path: Path, share: float) -> int:
    """Return a budget in which a device has room for so much of all keys and values."""
    engine = SliceEngine.open(path, ModelConfig(memory="4GiB", chunk_bytes=CHUNK_BYTES, **LONG))
    besides = 4 * GIB - offers.room_bytes(engine)
    memory = besides + int(share * engine.holdings.kv_bytes)
    engine.close()
    return memory


def send_all_away(run: Run, workers: str) -> int:
    """Have each device that spills send away all that is complete, now and later; return how many there are."""
    engines = [run.engine._supplied, *(run.workers[name]._engine for name in workers)]
    assignments = [engine._assignment for engine in engines if isinstance(engine, SliceEngine)]
    spills = [one._spilled.spill for one in assignments if one and one._spilled]
    for spill in spills:
        spill.room_bytes = 0
    return len(spills)


@in_child
def test_tokens_are_those_of_one_device_also_when_one_dies(folder: Path) -> None:
    spill_terms.ATTENTIONS_AT_ONCE = 1
    path = make_model("llama", folder)
    wanted, memory = alone(path), memory_for(path, SHARE)
    own = {"memory": memory, "kv_spill": folder / "spill"}
    with running(path, options=LONG, own=own) as run:
        coordinator.plan_ring = plan_ring  # the real one
        assert greedy(run.engine, 1) == wanted[:1]
        run.engine.front.rewind(0, 0)
        assert send_all_away(run, "bc") == 1, "who has two layers"

        def strike(i: int) -> None:
            if i == 5:
                run.hub.kill("b")
            elif i == 8:
                assert send_all_away(run, "c") == 2, "both that are left have two layers"

        assert greedy(run.engine, at=strike) == wanted
        figures = run.engine.kv_spill
        assert figures is not None
        assert figures.read_bytes > 0
        use = run.engine.mesh_use
        assert use is not None
        assert use.recoveries == 1
    assert list((folder / "spill").iterdir()) == []


@in_child
def test_without_files_it_is_refused_in_a_line(folder: Path) -> None:
    path = make_model("llama", folder)
    with pytest.raises(BudgetError, match="context of 262,144 tokens") as refusal:
        Run(path, options=LONG, own={"memory": memory_for(path, SHARE)})
    assert "\n" not in str(refusal.value)
