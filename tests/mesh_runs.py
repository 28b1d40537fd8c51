"""Runs over a mesh made of queues, in one process: a coordinator `a` and workers, for tests of either."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edge_run.base.config import ModelConfig
from edge_run.base.mesh import LinkRate, MeshOptions
from edge_run.base.sampling_config import SamplingConfig
from edge_run.base.units import KIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.fetch import exchange as piece_exchange
from edge_run.runtime.generation.batched_answers import BatchedAnswers
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.meter import Meter
from edge_run.runtime.generation.request import Turn
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh.engine import open_mesh_engine
from edge_run.runtime.worker.worker import Worker
from fake_mesh import Hub
from kept_tokens import kept
from mesh_processes import round_robin

OPTIONS = {"context_tokens": 256, "micro_batch_tokens": 32, "threads": 1, "check_file": False}
PROMPT = np.random.default_rng(1).integers(1, 380, 70).tolist()
CHUNK_BYTES = 64 * KIB
OWN: Mapping[str, object] = {"memory": "4GiB", "chunk_bytes": CHUNK_BYTES}


def greedy(
    engine: Engine, tokens: int = 16, at: Callable[[int], None] = lambda i: None, prompt: Sequence[int] = PROMPT
) -> list[int]:
    session = Session(engine.front)
    logits, _ = session.feed(prompt)
    said = []
    for i in range(tokens):
        at(i)
        said.append(int(logits.argmax()))
        logits = session.step(said[-1])
    return said


def answers(
    engine: Engine, prompts: Sequence[list[int]], at: Callable[[int, BatchedAnswers], None] = lambda i, batch: None
) -> list[list[int]]:
    """Return the tokens of greedy answers in shared passes. at: called each time before these advance."""
    batch = BatchedAnswers(engine, Meter(engine), 4)
    batch._widths.observe = lambda *_: None  # type: ignore[method-assign]  # who shares a pass depends on no clock
    found: dict[int, list[int]] = {}
    for prompt in prompts:
        answer = Continuation(engine.model, prompt, 12, SamplingConfig(temperature=0), engine.context_tokens)
        found[batch.submit(answer, Turn())] = answer.tokens
    for i in itertools.count():
        if batch.is_idle:
            break
        at(i, batch)
        assert all(event.error is None for event in batch.advance())
    batch.close()
    return [*found.values()]


def alone(path: Path, tokens: int = 16) -> list[int]:
    """Return what one device says, which is what a mesh must say too."""

    def compute() -> list[int]:
        engine = Engine.open(path, ModelConfig(memory="4GiB", **OPTIONS))
        try:
            return greedy(engine)
        finally:
            engine.close()

    assert tokens <= 16
    return kept(path, (OPTIONS, PROMPT), compute)[:tokens]


class Run:
    """A coordinator `a` and workers over a hub. own: settings of each."""

    own: Mapping[str, object] = OWN

    def __init__(
        self,
        path: Path,
        workers: str = "bc",
        options: dict[str, object] | None = None,
        bytes_per_s: float = 0.0,
        before: Callable[[Hub], None] = lambda hub: None,
        own: dict[str, object] | None = None,
    ) -> None:
        self.hub, self.own = Hub(), {**OWN, **(own or {})}
        before(self.hub)
        piece_exchange.IDLE_POLL_S = 0.05  # whoever closes waits for it
        if bytes_per_s:
            self.hub.rates = {pair: LinkRate("", 0.001, bytes_per_s) for pair in itertools.permutations("abc", 2)}
        self.said: list[str] = []
        self.on_say: Callable[[str], None] = self.said.append
        coordinator.plan_ring = round_robin
        self.path = path
        self.workers = {name: self.join(name) for name in workers}
        self.mesh = self.hub.join("a")
        self.config = ModelConfig(**{**self.own, **(options or OPTIONS)})
        self.open()

    def open_anew(self) -> None:
        """End the run and begin another one with the same workers, over a hub that alters nothing."""
        self.engine.close()
        self.hub.alter = lambda source, target, header, parts: (header, parts)
        self.said.clear()
        self.open()

    def open(self) -> None:
        """Open the coordinator's engine, for the first time or again."""
        self.engine = open_mesh_engine(self.path, self.config, self.mesh, MeshOptions(say=self._say))

    def _say(self, text: str) -> None:
        self.on_say(text)

    def join(self, name: str, models: Path | None = None) -> Worker:
        config = ModelConfig(**{**self.own, "threads": 1, "check_file": False})
        worker = Worker(self.hub.join(name), [models or self.path], config)
        worker.start()
        return worker

    def close(self) -> None:
        self.engine.close()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Worker.close, self.workers.values()))


@contextmanager
def running(
    path: Path,
    workers: str = "bc",
    options: dict[str, object] | None = None,
    bytes_per_s: float = 0.0,
    before: Callable[[Hub], None] = lambda hub: None,
    own: dict[str, object] | None = None,
) -> Iterator[Run]:
    """Close it at the end of the block. before: sees the hub before anybody joins. own: settings of each device."""
    run = Run(path, workers, options, bytes_per_s, before, own)
    try:
        yield run
    finally:
        run.close()
