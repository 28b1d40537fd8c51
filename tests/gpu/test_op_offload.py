"""Passes of many tokens on a GPU that has a part of the model: the rest is copied there, also while it streams.

Each test runs in a child process, which missing weights would end: memory that holds none cannot be read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_run import Cancelled, TierReadError
from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.devices.host.profile import Measurements
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.gpu.devices import find_gpus
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.probing.gpu_probe import is_known
from edge_run.runtime.probing.probe import probe, recall
from gpu_pairs import OPTIONS, bytes_of, differing, logits_of, offloads, open_engine, smallest, tokens_of
from in_child import in_child
from sabotage import sabotage
from tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def n_copied(engine: Engine) -> int:
    """How many parts of the graphs that the engine knows have weights copied for them."""
    cuts = engine._loaded.driver._cuts
    if cuts is None:
        return 0
    programs = engine._loaded.driver.programs.values()
    return max(sum(name in cuts.reads for split in program.splits for name in split.inputs) for program in programs)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mamba"])
def test_logits_are_those_of_llama_cpp_that_copies_the_same(name: str, folder: Path) -> None:
    """A pass of 32 tokens, one of 18, and single ones; qwen3 has norms that are copied for a few tokens too."""
    _logits_are_the_same(path=make_model(name, folder))


@in_child
def _logits_are_the_same(path: Path) -> None:
    for choice in offloads(path, 3, op_offload=True)[:2]:
        budget = choice.sizes.total_bytes
        with open_engine(path, budget, backend="llama.cpp", op_offload=True) as engine:
            wanted = logits_of(engine)
            key = engine.numerics
        assert "op offload" in key.gpu
        with open_engine(path, budget, op_offload=True) as engine:
            assert (engine.numerics, engine.plan.mode) == (key, "resident")
            assert differing(wanted, logits_of(engine)) == 0
        with open_engine(path, budget, 0, op_offload=True) as engine:
            assert (engine.numerics, engine.plan.mode) == (key, "streamed")
            for _ in range(2):  # by graphs that are not known, and by those that are
                assert differing(wanted, logits_of(engine)) == 0
                engine.decoder.rewind(0, 0)
            assert n_copied(engine) > 2
        with open_engine(path, budget, 0, op_offload=False) as engine:
            assert engine.numerics != key
            logits_of(engine)
            assert n_copied(engine) == 0


@in_child
def test_an_moe_copies_its_experts_where_they_stay_and_not_where_they_stream(folder: Path) -> None:
    path = make_model("qwen3moe", folder)
    choice = offloads(path, 3, op_offload=True)[1]
    budget = choice.sizes.total_bytes
    for memory, is_copied in ((None, True), (0, False)):
        same = bytes_of(path, choice.placement, op_offload=is_copied)
        with open_engine(path, same, backend="llama.cpp", op_offload=is_copied) as engine:
            wanted = logits_of(engine)
        with open_engine(path, budget, memory, op_offload=True) as engine:
            assert engine.plan.gpu
            assert engine.plan.gpu.op_offload == is_copied
            assert engine.plan.mode == ("resident" if is_copied else "streamed")
            assert differing(wanted, logits_of(engine)) == 0


@in_child
def test_after_reads_that_fail_in_a_prefill_batch_the_logits_are_right(folder: Path) -> None:
    """llama.cpp goes on copying after a failure: what is not there must be readable till it returns."""
    path = make_model("llama", folder)
    budget = smallest(path, op_offload=True)
    with open_engine(path, budget, backend="llama.cpp", op_offload=True) as engine:
        wanted = logits_of(engine)
    saboteur = sabotage()
    with open_engine(path, budget, 0, op_offload=True) as engine:
        n_failures = 0
        for first in (2, 5, 9, 14):
            saboteur.set(first, 1)
            try:
                found = logits_of(engine)
            except TierReadError:
                n_failures += 1
            saboteur.set(-(10**9))
            engine.decoder.rewind(0, 0)
            found = logits_of(engine)
            assert differing(wanted, found) == 0
            engine.decoder.rewind(0, 0)
        assert n_failures


@in_child
def test_a_prefill_batch_that_is_cancelled_leaves_the_next_one_right(folder: Path) -> None:
    path = make_model("llama", folder)
    budget = smallest(path, op_offload=True)
    with open_engine(path, budget, 0, op_offload=True) as engine:
        tokens = tokens_of(engine)[:32]
        batch = [BatchToken(token, i, 0, i == 31) for i, token in enumerate(tokens)]
        wanted = engine.decoder.decode(batch).copy()
        (stream,) = engine._supplied.streams
        for _ in range(2):
            engine.decoder.rewind(0, 0)
            acquire, n_calls = stream.weights.acquire, 0  # type: ignore[union-attr]

            def cancelling(*arguments: object, acquire=acquire) -> float:  # type: ignore[no-untyped-def]
                nonlocal n_calls
                n_calls += 1
                if n_calls == 4:
                    engine.interrupt.cancel()
                return float(acquire(*arguments))

            stream.weights.acquire = cancelling  # type: ignore[union-attr, method-assign]
            with pytest.raises(Cancelled):
                engine.decoder.decode(batch)
            stream.weights.acquire = acquire  # type: ignore[union-attr, method-assign]
            engine.decoder.rewind(0, 0)
            assert np.array_equal(wanted, engine.decoder.decode(batch))


@in_child
def test_a_gpu_that_is_measured_gives_times(folder: Path) -> None:
    """Kept, and found again; of the plan with a part of the model there."""
    path, cache = make_model("llama", folder), folder / "cache"
    options = {**OPTIONS, "gpu_memory": smallest(path) * 3, "check_file": True, "cache_folder": cache, "threads": 1}
    planned = planner(path, ModelConfig(**options))
    assert planned.offload
    assert recall(planned.gguf, planned.config) is None
    profile = probe([], path, planned.config)
    gpu = profile.gpus[0]
    assert gpu.backend == find_gpus()[0].name
    assert {speed.type_name for speed in gpu.kernels} >= {"F16"}
    assert all(speed.bytes_per_s > 1e5 for speed in gpu.kernels)
    assert min(gpu.upload_bytes_per_s / 1e7, gpu.node_s * 1e9, gpu.border_s * 1e9, *gpu.attention_flops_per_s) > 1
    known = recall(planned.gguf, planned.config)
    assert known
    assert known.gpus[0].kernels == gpu.kernels
    assert not is_known(find_gpus()[0], [("Q2_K", 256, 1, False)], Measurements())
    forecast = planned.timed(planned.plan(), known, 64).forecast
    assert forecast
    assert 0 < forecast.compute_s_per_token < 60
    assert 0 < 1 / forecast.decode_tokens_per_s < 60
