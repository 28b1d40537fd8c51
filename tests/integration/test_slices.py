"""Slices: engines that each compute some layers of a model give the logits of one engine, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slices
from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, NotSupported
from edge_run.base.protocols import BatchToken
from edge_run.base.units import KIB, MIB
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama.holdings import book_bytes
from edge_run.runtime.planning import spill_terms
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.tiers.kv.spill import Spill
from in_child import in_child, run_script
from talks import OPTIONS, SEQUENCES, Talk, check_rows, say, say_in_branches
from tiny_models import make_model

# Scales its input; reuses earlier layers' keys and values; has states that are prepared early; is a mixture of experts;
# runs its blocks several times; has several tensors alive at a cut; learns its positions.
ARCHITECTURES = ("granite", "gemma3n", "mamba", "granitehybrid", "qwen3moe", "nanbeige", "deepseek4", "gpt2")


def compare(path: Path, *flags: str) -> dict[str, Any]:
    done = run_script(slices.__file__, str(path), *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_three_engines_give_the_logits_of_one(name: str, folder: Path) -> None:
    found = compare(make_model(name, folder), "--owners", "1,2,1", "--again")
    assert found["finite"]
    assert (found["different_rows"], found["different_again"]) == (0, 0)
    assert found["units"] > 4
    assert found["sent_bytes"] > 0
    assert min(found["kv_bytes"]) < max(found["kv_bytes"]), "the others' keys and values take no memory"


@pytest.mark.parametrize("name", ["granite", "mamba"])
def test_and_so_they_do_when_they_stream(name: str, folder: Path) -> None:
    found = compare(make_model(name, folder), "--owners", "1,1", "--streams")
    assert found["different_rows"] == 0
    assert found["streamed_bytes"][0] > 0


@pytest.mark.parametrize("name", ["granite", "gemma3n", "mamba", "gpt2"])
def test_and_when_what_wide_passes_compute_in_is_lent_in_between(name: str, folder: Path) -> None:
    found = compare(make_model(name, folder), "--owners", "1,1", "--lends", "--prefill", "150", "--decode", "12")
    assert found["different_rows"] == 0
    assert min(found["lent_bytes"]) > 0
    assert min(found["times_lent"]) > 2


@pytest.mark.parametrize("name", ["granite", "mamba"])
def test_and_when_what_streams_of_a_stage_visit_is_held_for_all_of_it(name: str, folder: Path) -> None:
    flags = ("--prefill", "150", "--decode", "12", "--visits")
    found = compare(make_model(name, folder), "--owners", "1,1", *flags)
    assert found["different_rows"] == 0
    assert found["holds_stage_visits"] == [True, True]
    assert min(found["streamed_bytes"]) > 0
    assert min(found["times_lent"]) > 2


def say_to_the_end(talk: Talk) -> None:
    """A text that fills the context of 4,096 tokens nearly, and is cut."""
    talk.prompt(3500)
    for n_tokens in (250, 150, 150):
        talk.step(2)
        talk.prompt(n_tokens)
    talk.step(2)
    talk.rewind(3600)
    talk.step(2)
    talk.prompt(300)
    talk.step(1)


@pytest.mark.parametrize(
    ("name", "room", "options"),
    [
        ("llama", "fewest", {"context_tokens": 4096}),
        ("gemma3", "fewest", {}),
        ("qwen3moe", "experts", {"context_tokens": 4096}),
        ("falcon-h1", "fewest", {"context_tokens": 4096}),
        ("llama", "fewest", {"context_tokens": 4096, "sequences": SEQUENCES}),
        ("llama", "visits", {"context_tokens": 4096}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
@in_child
def test_keys_and_values_take_room_from_weights_when_they_are_written(
    name: str, room: str, options: dict[str, Any], folder: Path
) -> None:
    """Of one device's layers as of a whole model: with a window for some of them, with experts, beside states, for
    trees of guesses, and where all that streams of a stage visit is held.
    """
    path, settings = make_model(name, folder, scale=2 if name in ("llama", "qwen3moe") else 1), {**OPTIONS, **options}
    script = say_to_the_end if room == "visits" else say_in_branches if "sequences" in options else say
    with slices.least_lent():
        engines = {
            node: SliceEngine.open(path, ModelConfig(memory="8GiB", **settings, chunk_bytes=8 * KIB)) for node in "ab"
        }
    with slices.room_for(room, path.stat().st_size):
        together = slices.Together(engines, slices.owners_of(len(engines["a"].layout.units), [1, 1]))
    said, witnesses = slices.say_known(together, script)
    for engine, witness in zip(engines.values(), witnesses, strict=True):
        plan, lender = engine.plan, witness.lender
        assert getattr(engine._supply.streams[0], "holds_stage_visits", False) == (room == "visits")
        assert (plan.expert_bytes > 0) == (room == "experts")
        assert (engine.lendable_bytes > 0) == ("sequences" not in options)
        assert 0 < plan.lent_bytes <= plan.kv_bytes + engine.lendable_bytes
        held = [point.weights_bytes for point in plan.by_context]
        assert held == sorted(held, reverse=True)
        assert held[-1] < held[0]
        assert lender._cells, "keys and values change hands"
        assert lender.loans.times_granted > 1
        assert (np.diff(witness.counts) < 0).sum() > 1, witness.counts
    for engine in engines.values():
        engine.close()
    check_rows(path, script, settings, said)


@in_child
def test_a_context_takes_no_memory_before_it_is_assigned_and_must_fit_then(folder: Path) -> None:
    """A slice opens with the keys and values of all layers; what it does not compute never takes any memory."""
    path = make_model("llama", folder)
    options = {"context_tokens": 1 << 18, "micro_batch_tokens": 8, "threads": 1, "cache_folder": folder / "cache"}
    held = process_memory().resident_bytes
    engine = SliceEngine.open(path, ModelConfig(memory=held + 384 * MIB, **options))
    assert engine.holdings.reserve_bytes > book_bytes(1 << 18) == 62 * MIB
    kv_bytes, n_units = engine.holdings.kv_bytes, len(engine.layout.units)
    assert kv_bytes > 400 * MIB
    assert process_memory().peak_bytes < held + 64 * MIB, "not even for a moment"
    transport = slices.QueueTransport({}, "a")
    with pytest.raises(BudgetError, match="context of 262,144 tokens"):
        engine.assign(slices.Share(("a",) * n_units, "a"), transport)
    engine.assign(slices.Share(tuple("a" if unit < 2 else "b" for unit in range(n_units)), "a"), transport)
    assert 0 < engine.plan.kv_bytes < 0.6 * kv_bytes
    assert process_memory().peak_bytes < held + 80 * MIB
    engine.close()


def open_spilling_slices(path: Path, options: dict[str, Any]) -> dict[str, SliceEngine]:
    """Open two engines in the least memory in which each has room for half of the layers."""
    memory = 60 * MIB
    while True:
        engines = {node: SliceEngine.open(path, ModelConfig(memory=memory, **options)) for node in "ab"}
        owners = slices.owners_of(len(engines["a"].layout.units), [1, 1])
        try:
            for node, engine in engines.items():
                engine.assign(slices.Share(tuple(owners), node), slices.QueueTransport({}, node))
            return engines
        except BudgetError as error:
            memory = max(memory + MIB, error.minimum_bytes)
            for engine in engines.values():
                engine.close()


def spills_of(engines: dict[str, SliceEngine]) -> list[Spill]:
    """Return the spills of those that have one, and let all that is complete be away."""
    assignments = (engine._assignment for engine in engines.values())
    spills = [one._spilled.spill for one in assignments if one and one._spilled]
    for spill in spills:
        spill.room_bytes = 0
    return spills


def say_in_pieces(talk: Talk) -> None:
    """A text of several pieces that grows, is guessed at, and is cut in what is away."""
    talk.prompt(400)
    talk.step(3)
    talk.verify(5, 2)
    talk.prompt(100)
    talk.step(2)
    talk.rewind(200)
    talk.step(2)
    talk.clear()
    talk.prompt(150)
    talk.step(1)


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "falcon-h1"])
@in_child
def test_keys_and_values_of_a_slice_go_to_a_file_of_its_device(name: str, folder: Path) -> None:
    """Of whatever layers it has in turn: what was away of those before is forgotten."""
    spill_terms.ATTENTIONS_AT_ONCE = 1
    path, settings = make_model(name, folder), {**OPTIONS, "context_tokens": 65_536}
    engines = open_spilling_slices(path, {**settings, "kv_spill": folder / "spill", "chunk_bytes": 8 * KIB})
    owners = slices.owners_of(len(engines["a"].layout.units), [1, 1])
    for these in (owners, ["a", *reversed(owners[1:-1]), "a"]):
        together = slices.Together(engines, these)
        spills = spills_of(engines)
        assert spills
        said, _ = slices.say_known(together, say_in_pieces)
        for spill in spills:
            spill.texts[0].check()
            assert spill.file.read_bytes > spill.file.written_bytes > 0
        assert all(engine.plan.context_tokens == 65_536 for engine in engines.values())
        check_rows(path, say_in_pieces, settings, said)
    for engine in engines.values():
        engine.close()
    assert list((folder / "spill").iterdir()) == []


def test_keys_and_values_of_several_texts_on_a_mesh_do_not_go_to_a_file(folder: Path) -> None:
    with pytest.raises(NotSupported, match=r"kv spill: .* \(sequences=1\)") as refusal:
        SliceEngine.open(make_model("llama", folder), ModelConfig(kv_spill="on", context_tokens=64, sequences=2))
    assert "\n" not in str(refusal.value)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux is told which cores threads use")
@in_child
def test_as_many_threads_as_cores_keep_one_each_and_leave_other_threads_all(folder: Path) -> None:
    path, allowed = make_model("llama", folder), sorted(os.sched_getaffinity(0))[:2]
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    os.sched_setaffinity(0, allowed)
    options = {"context_tokens": 64, "threads": 2, "memory": "1GiB", "cache_folder": folder / "cache"}
    batch = [BatchToken(1, 0, 0, True)]
    plain = Engine.open(path, ModelConfig(**options))
    wanted = plain.decoder.decode(batch).copy()
    plain.close()
    engine = SliceEngine.open(path, ModelConfig(**options))
    engine.assign(slices.Share(("a",) * len(engine.layout.units), "a"), slices.QueueTransport({}, "a"))
    found = engine.decoder.decode(batch)
    cores = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    assert np.array_equal(wanted, found)
    assert [kept for kept in cores if len(kept) == 1] == [{allowed[1]}]
    assert os.sched_getaffinity(0) == set(allowed)
    os.sched_setaffinity(0, allowed[:1])
    engine.decoder.decode([BatchToken(2, 1, 0, True)])
    assert os.sched_getaffinity(0) == {allowed[0]}, "what was chosen later holds"
    engine.close()


@in_child
def test_where_cores_cannot_be_chosen_it_computes_all_the_same(folder: Path) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError("not allowed here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", refuse)
        patch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
        options = {"context_tokens": 64, "threads": 2, "memory": "1GiB", "cache_folder": folder / "cache"}
        engine = SliceEngine.open(make_model("llama", folder), ModelConfig(**options))
        engine.assign(slices.Share(("a",) * len(engine.layout.units), "a"), slices.QueueTransport({}, "a"))
        assert np.isfinite(engine.decoder.decode([BatchToken(1, 0, 0, True)])).all()
        engine.close()
