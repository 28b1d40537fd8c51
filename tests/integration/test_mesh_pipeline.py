"""Groups of answers that the devices of a mesh compute at the same time: the bits of one device, whatever happens.

In one process, over a mesh made of queues; the last test has real processes and a real broker.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled, KernelError
from edge_run.base.fields import Document
from edge_run.base.protocols import BatchToken
from edge_run.base.sampling_config import SamplingConfig
from edge_run.partition.mesh_pipeline import plan_pipeline
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_ring import Hop
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.batched_answers import BatchedAnswers
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.meter import Meter
from edge_run.runtime.generation.request import Turn
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh.engine import open_mesh_engine
from edge_run.runtime.slices.engine import SliceEngine
from in_child import in_child
from mesh_processes import mesh_of
from mesh_runs import OPTIONS, PROMPT, Run, answers, running
from mosquitto import PROGRAM
from program import MESH, fork_from_here
from tiny_models import make_model

MANY = {**OPTIONS, "context_tokens": 1024, "sequences": 4}
PROMPTS = [PROMPT[: 5 + 9 * i] for i in range(6)]


def over_all(works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: object, sequences: int) -> MeshPlan | None:
    """Return the plan over links that cost nothing, which is of all devices."""
    return plan_pipeline(works, specs, lambda a, b: Hop(0.0), sequences)


def batches() -> list[list[BatchToken]]:
    """Return passes of several sequences: of prompts, with and without rows of logits, and of answers."""
    tokens = np.random.default_rng(3).integers(1, 300, (4, 60))

    def batch(*parts: tuple[int, int, int, bool]) -> list[BatchToken]:
        return [
            BatchToken(int(tokens[sequence][at]), at, sequence, wants_last and at == end - 1)
            for sequence, start, end, wants_last in parts
            for at in range(start, end)
        ]

    return [
        batch((0, 0, 31, True)),
        batch((1, 0, 7, True), (0, 31, 32, True)),
        batch((2, 0, 20, False)),
        batch((2, 20, 21, True), (0, 32, 33, True), (1, 7, 8, True)),
        batch((0, 33, 34, True)),
        batch((1, 8, 9, True), (2, 21, 22, True)),
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
@in_child
def test_the_bits_are_those_of_one_device(name: str, folder: Path) -> None:
    path = make_model(name, folder)
    engine = Engine.open(path, ModelConfig(memory="4GiB", **MANY))  # type: ignore[arg-type]
    wanted = [engine.front.decode(batch).copy() for batch in batches()]
    engine.close()
    coordinator.plan_pipeline = over_all
    with running(path, options=MANY) as run:
        front: Any = run.engine.front
        use = run.engine.mesh_use
        assert use is not None
        assert len(use.nodes) == 3
        assert use.groups == front.most_in_flight > 1
        found = []
        for number, batch in enumerate(batches()):
            if number >= 3:
                found.append(front.finish().copy())
            front.begin(batch)
        found += [front.finish().copy() for _ in range(3)]
        for rows, expected in zip(found, wanted, strict=True):
            assert np.array_equal(rows, expected)
        long = [BatchToken(5 + i, i, 3, i in (33, 70)) for i in range(71)]
        assert front.decode(long).shape == (2, engine.model.vocabulary), "of several passes"


@in_child
def test_passes_are_begun_before_others_are_finished(folder: Path) -> None:
    coordinator.plan_pipeline = over_all
    events: list[str] = []

    def note(source: str, target: str, header: Document) -> None:
        if target == "b" and header["kind"] == "command" and header["what"] == "decode":
            events.append("begun")
        if target == "a" and header["kind"] == "activation":
            events.append("around")

    with running(make_model("llama", folder), options=MANY) as run:
        run.hub.on_send = note
        answers(run.engine, PROMPTS)
        engine = run.workers["b"]._engine
        assert engine is not None
        assert engine.most_in_flight == 4
        one = SliceEngine.open(run.path, run.config, most_in_flight=1)
        handed_on_bytes = engine.width * max(unit.entry_bytes for unit in engine.layout.units)
        assert engine.holdings.reserve_bytes - one.holdings.reserve_bytes == 3 * handed_on_bytes, "for those that wait"
        one.close()
        assert run.engine.front.capabilities.context_tokens == 1024 - 4, "which leaves cells for tails"
    ahead = list(itertools.accumulate(1 if event == "begun" else -1 for event in events))
    assert max(ahead) >= 2
    assert ahead[-1] == 0


@in_child
def test_a_device_that_dies_with_several_passes_in_flight(folder: Path) -> None:
    path = make_model("llama", folder)
    coordinator.plan_pipeline = over_all
    for victim, moment in (("b", 4), ("c", 23)):
        with running(path, options=MANY) as run:
            wanted = answers(run.engine, PROMPTS)
            sent = itertools.count()

            def strike(source: str, target: str, header: Document, run: Any = run, sent: Any = sent,
                       victim: str = victim, moment: int = moment) -> None:  # fmt: skip
                if header["kind"] == "activation" and next(sent) == moment:
                    run.hub.kill(victim)

            run.hub.on_send = strike
            assert answers(run.engine, PROMPTS) == wanted
            use = run.engine.mesh_use
            assert use is not None
            assert use.recoveries == 1
            run.hub.kill("c" if victim == "b" else "b")
            assert answers(run.engine, PROMPTS) == wanted, "alone"


@contextmanager
def stopped_at(run: Run, moment: int, pause_s: float = 0.0) -> Iterator[None]:
    """Cancel what is computed at the activation of that number, which is held back for `pause_s` then."""
    sent = itertools.count()

    def stop(source: str, target: str, header: Document) -> None:
        if header["kind"] == "activation" and next(sent) == moment:
            run.engine.interrupt.cancel()
            time.sleep(pause_s)

    run.hub.on_send = stop
    yield
    run.hub.on_send = lambda source, target, header: None
    run.engine.interrupt.reset()


@in_child
def test_answers_that_are_stopped_or_dropped_with_passes_in_flight_leave_nothing_behind(folder: Path) -> None:
    coordinator.plan_pipeline = over_all
    with running(make_model("llama", folder), options=MANY) as run:
        wanted = answers(run.engine, PROMPTS)
        for moment in (3, 22):
            with stopped_at(run, moment):
                answers(run.engine, PROMPTS)  # all end where they were
            assert answers(run.engine, PROMPTS) == wanted
        batch = BatchedAnswers(run.engine, Meter(run.engine), 4)
        for prompt in PROMPTS:
            batch.submit(greedily(run.engine, prompt), Turn())
        for _ in range(5):
            batch.advance()
        batch.close()  # with passes in flight
        assert answers(run.engine, PROMPTS) == wanted

        def drop(i: int, batch: BatchedAnswers) -> None:
            if i == 4:
                batch.drop(1)

        found = answers(run.engine, PROMPTS, drop)
        assert [len(tokens) for number, tokens in enumerate(found) if number != 1] == [12] * 5
        assert answers(run.engine, PROMPTS) == wanted


@in_child
def test_a_context_that_runs_full_with_several_passes_in_flight(folder: Path) -> None:
    coordinator.plan_pipeline = over_all
    short = {**MANY, "context_tokens": 256}  # the six prompts have 165 tokens, and others are kept beside
    prompts = [[7 + i, *PROMPT[:55]] for i in range(8)]
    with running(make_model("llama", folder), options=short) as run:
        found = answers(run.engine, prompts)
        assert [len(tokens) for tokens in found] == [12] * 8


@in_child
def test_a_batch_that_cannot_be_begun_leaves_the_others_in_flight(folder: Path) -> None:
    coordinator.plan_pipeline = over_all
    with running(make_model("llama", folder), options=MANY) as run:
        front: Any = run.engine.front
        first, second = batches()[:2]
        wanted = [front.decode(batch).copy() for batch in (first, second)]
        front.rewind(0, 0)
        front.rewind(1, 0)
        front.begin(first)

        def stop(source: str, target: str, header: Document) -> None:
            if header["kind"] == "command":
                run.engine.interrupt.cancel()

        run.hub.on_send = stop
        with pytest.raises(Cancelled):
            front.begin(second)
        run.hub.on_send = lambda source, target, header: None
        assert np.array_equal(front.finish(), wanted[0])
        assert np.array_equal(front.decode(second), wanted[1])


@in_child
def test_models_whose_caches_cannot_be_shared_keep_one_pass_at_a_time(folder: Path) -> None:
    for name in ("gemma2", "mamba"):
        with running(make_model(name, folder), options=MANY) as run:
            assert run.engine.front.most_in_flight == 1
            assert run.engine.front.capabilities.context_tokens == 1024


@pytest.mark.skipif(PROGRAM is None, reason="mosquitto is not installed")
@in_child
def test_real_devices_one_of_which_is_killed_in_the_middle(folder: Path, tmp_path: Path) -> None:
    fork_from_here(MESH)
    path = make_model("llama", folder)
    coordinator.plan_pipeline = over_all
    with mesh_of(tmp_path, path, ["b", "c"]) as mesh:
        here = mesh.join()
        mesh.wait_for(here, 2)
        config = ModelConfig(memory="4GiB", chunk_bytes=16384, **MANY)  # type: ignore[arg-type]
        engine = open_mesh_engine(path, config, here)
        wanted = answers(engine, PROMPTS)
        use = engine.mesh_use
        assert use is not None
        assert len(use.nodes) == 3
        assert answers(engine, PROMPTS, lambda i, batch: mesh.workers["c"].kill() if i == 9 else None) == wanted
        use = engine.mesh_use
        assert use is not None
        assert [node.name for node in use.nodes] == ["here", "b"]
        assert use.recoveries == 1
        engine.close()


@in_child
def test_what_was_shared_in_flight_is_computed_anew_where_its_pass_was_stopped(folder: Path) -> None:
    """Later answers to prompts that begin alike went on from what the other devices had never computed."""
    coordinator.plan_pipeline = over_all
    prompts = [[*PROMPT, 7 + i] for i in range(4)]
    with running(make_model("llama", folder), options=MANY) as run:
        wanted = answers(run.engine, prompts)
        for moment in (3, 4):
            batch = BatchedAnswers(run.engine, Meter(run.engine), 4)
            with stopped_at(run, moment, pause_s=0.1):  # so that what was begun after it is not computed
                said(batch, run.engine, prompts)
            assert said(batch, run.engine, prompts) == wanted, moment
            batch.close()
        check_what_counts_as_cached(run, prompts)


def check_what_counts_as_cached(run: Run, prompts: Sequence[list[int]]) -> None:
    """What was shared while it was in flight was said to have been there, though it was computed after all."""
    front: Any = run.engine.front
    finish = front.finish

    def fail() -> None:
        front.finish = finish
        raise KernelError("on purpose")

    with BatchedAnswers(run.engine, Meter(run.engine), 4) as batch:
        _, *others = [batch.submit(greedily(run.engine, prompt), Turn()) for prompt in prompts]
        batch.advance()
        front.finish = fail
        with pytest.raises(KernelError):
            batch.advance()
        held = {number: batch._scheduler.n_held(number) for number in others}
        assert all(n_tokens < len(PROMPT) for n_tokens in held.values()), "the rest was in flight"
        found: dict[int, int] = {}
        while not batch.is_idle:
            pieces = {event.request: event.piece for event in batch.advance()}
            found |= {n: one.generation.cached_tokens for n, one in pieces.items() if one and one.generation}
        assert {number: found[number] for number in others} == held


def greedily(engine: Engine, prompt: list[int]) -> Continuation:
    return Continuation(engine.model, prompt, 12, SamplingConfig(temperature=0), engine.context_tokens)


def said(batch: BatchedAnswers, engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the tokens of greedy answers in passes of `batch`, as far as these get."""
    texts = [greedily(engine, prompt) for prompt in prompts]
    for text in texts:
        batch.submit(text, Turn())
    while not batch.is_idle:
        batch.advance()
    return [text.tokens for text in texts]
