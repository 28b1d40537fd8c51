"""A context on a mesh that has no room in the memory of all devices together: each has a file for its own layers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edge_run.base.config import KV_SPILL_OFF, ModelConfig
from edge_run.base.errors import BudgetError, TierReadError, from_system
from edge_run.base.units import GIB, KIB
from edge_run.runtime.mesh import coordinator, offers
from edge_run.runtime.mesh.coordinator import plan_ring
from edge_run.runtime.planning import spill_terms
from edge_run.runtime.slices.engine import SliceEngine
from in_child import in_child
from mesh_runs import OPTIONS, Run, alone, greedy, running
from tiny_models import make_model

LONG = {**OPTIONS, "context_tokens": 1 << 18}
CHUNK_BYTES = 16 * KIB  # small against a budget that has little more than one layer
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
    own = {"memory": memory, "kv_spill": folder / "spill", "chunk_bytes": CHUNK_BYTES}
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


@pytest.mark.parametrize("has_other_plan", [True, False])
@in_child
def test_a_drive_that_fills_has_others_take_its_layers_or_is_named_where_none_can(
    has_other_plan: bool, folder: Path
) -> None:
    """The answer ended with the budget of the device that runs the model, which is not what is to be mended."""
    spill_terms.ATTENTIONS_AT_ONCE = 1
    path = make_model("llama", folder)
    wanted = alone(path)
    own = {"memory": memory_for(path, SHARE), "kv_spill": folder / "spill", "chunk_bytes": CHUNK_BYTES}
    two_layers = {"kv_spill": KV_SPILL_OFF, "memory": memory_for(path, 0.7)}
    options = LONG if has_other_plan else {**LONG, **two_layers}

    def write(address: int, length: int, offset: int) -> None:
        raise from_system(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "writing keys and values")

    with running(path, "b", options=options, own=own) as run:
        coordinator.plan_ring = plan_ring  # the real one
        assert send_all_away(run, "b") == 1 + has_other_plan
        engine = run.workers["b"]._engine
        assert engine is not None
        engine._assignment._spilled.spill.file.write = write  # type: ignore[union-attr, method-assign]
        if has_other_plan:
            assert greedy(run.engine) == wanted
            use = run.engine.mesh_use
            assert use is not None
            assert not use.left_out
        else:
            with pytest.raises(TierReadError, match=r"^name of b: .*No space left on device; free some sp") as refusal:
                greedy(run.engine)
            assert refusal.value.errno == errno.ENOSPC
        assert any("name of b has less room than it seemed" in line for line in run.said), run.said


@in_child
def test_without_files_it_is_refused_in_a_line(folder: Path) -> None:
    path = make_model("llama", folder)
    with pytest.raises(BudgetError, match="context of 262,144 tokens") as refusal:
        Run(path, options=LONG, own={"memory": memory_for(path, SHARE), "chunk_bytes": CHUNK_BYTES})
    assert "\n" not in str(refusal.value)
