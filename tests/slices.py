"""Runs a model as slices on several engines in one process, and compares the logits with those of one engine.

    python slices.py MODEL.gguf --owners 3,1 [--prefill 70] [--decode 6] [--streams]

Run as a child process: a read of weights that are not resident ends it. Prints one JSON line. --streams: each engine
has the fewest frames that can work. --lends: and what passes of one token leave of the buffers is lent to weights,
however little it is, while prompts and single tokens alternate. --visits: that too, and each engine has room for most
of its share, so that it holds what streams of a stage visit throughout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled
from edge_run.base.protocols import BatchToken
from edge_run.base.units import KIB, MIB
from edge_run.runtime.decoding.driver import GraphChanged, PassShape
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.planning.expert_plan import MoePlan
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.maps import MOST_MAPS
from edge_run.runtime.slices.slice import Share
from edge_run.runtime.streaming import assemble
from edge_run.tiers.kv import loans
from exactness import fewest_frames, places
from talks import Talk
from witness import Witness

CHUNK_BYTES = 64 * KIB


class QueueTransport:
    """Activations through queues in one process, copied as a socket would."""

    def __init__(self, queues: dict[tuple[str, int], queue.Queue[Any]], node: str) -> None:
        self._queues, self._node = queues, node
        self.sent_bytes = 0

    def begin(self) -> None:
        pass

    def receive(self, unit: int, sizes: Sequence[int]) -> Sequence[memoryview]:
        parts = self._queues[self._node, unit].get(timeout=100)
        if parts is None:
            raise Cancelled("the other engine failed")
        return [memoryview(part) for part in parts]

    def send(self, unit: int, node: str, parts: Sequence[memoryview]) -> None:
        self.sent_bytes += sum(part.nbytes for part in parts)
        self._queues[node, unit].put([bytes(part) for part in parts])


class Together:
    """Engines that decode the same batches, each on a thread; the first one's logits count."""

    def __init__(self, engines: dict[str, SliceEngine], owners: Sequence[str]) -> None:
        self.engines = engines
        self.queues = {(n, u): queue.Queue() for n in engines for u in range(len(owners) + 1)}
        self.transports = {n: QueueTransport(self.queues, n) for n in engines}
        self.last_shape = PassShape(1, 1)
        for node, engine in engines.items():
            engine.assign(Share(tuple(owners), node), self.transports[node])

    def decode(self, batch: Sequence[BatchToken]) -> np.ndarray:
        self.last_shape = PassShape(len(batch), sum(token.wants_logits for token in batch))
        return self._each(lambda engine: engine.decoder.decode(batch))[0].copy()

    def learn(self, shape: PassShape) -> None:
        self._each(lambda engine: engine.learn(shape))

    def rewind(self, sequence: int, position: int) -> int:
        (end,) = {engine.decoder.rewind(sequence, position) for engine in self.engines.values()}
        return end

    def clear(self) -> None:
        for engine in self.engines.values():
            engine.decoder.clear()

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        for engine in self.engines.values():
            engine.decoder.branch(sequence, branches)

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        for engine in self.engines.values():
            engine.decoder.keep(sequence, position, branch, branches)

    def _each(self, work: Any) -> list[Any]:
        results: dict[str, Any] = {}

        def run(node: str, engine: SliceEngine) -> None:
            try:
                results[node] = work(engine)
            except BaseException as error:
                results[node] = error
                for (other, _), waiting in self.queues.items():
                    if other != node:
                        waiting.put(None)

        threads = [threading.Thread(target=run, args=item) for item in self.engines.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for waiting in self.queues.values():
            while not waiting.empty():
                waiting.get()
        errors = [error for error in results.values() if isinstance(error, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
            raise error
        return [results[node] for node in self.engines]


def owners_of(n_units: int, counts: Sequence[int]) -> list[str]:
    """Return who owns which unit: the first node the ends, all nodes in turn `counts` units between them."""
    names = [chr(ord("a") + i) for i in range(len(counts))]
    cycle = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    return ["a", *(cycle[i % len(cycle)] for i in range(n_units - 2)), "a"]


def batches_of(tokens: Sequence[int], prefill: int, width: int) -> list[list[BatchToken]]:
    parts = [range(start, min(start + width, prefill)) for start in range(0, prefill, width)]
    parts += [range(i, i + 1) for i in range(prefill, len(tokens))]
    return [[BatchToken(tokens[i], i, 0, i == part[-1]) for i in part] for part in parts]


def alternating(tokens: Sequence[int], prefill: int, width: int) -> list[list[BatchToken]]:
    """Return batches of a prompt in parts, with two single tokens after each, and of single tokens after it."""
    batches, position = [], 0
    while position < len(tokens):
        sizes = (width, 1, 1) if position + width <= prefill else (1,)
        for size in sizes:
            part = range(position, min(position + size, len(tokens)))
            batches.append([BatchToken(tokens[i], i, 0, i == part[-1]) for i in part])
            position += size
    return [batch for batch in batches if batch]


def most_places(segments: Sequence[Sequence[int]], fewest: int) -> int:
    """Return how many chunks there is room for where a MiB of it is lacking."""
    return max(len({chunk for segment in segments for chunk in segment}) - MIB // CHUNK_BYTES, fewest)


@contextlib.contextmanager
def least_lent() -> Iterator[None]:
    """Let memory be lent in this block however little it is."""
    real = loans.LEAST_IDLE_BYTES, loans.MARGIN_BYTES
    loans.LEAST_IDLE_BYTES, loans.MARGIN_BYTES = 1, 0
    try:
        yield
    finally:
        loans.LEAST_IDLE_BYTES, loans.MARGIN_BYTES = real


@contextlib.contextmanager
def room_for(what: str, model_bytes: int) -> Iterator[None]:
    """Let plans in this block have little room, of which a part is lent.

    what: `fewest` frames that work; all but 245 chunks (`visits`); a quarter of `model_bytes` (`experts`).
    """
    real = assemble.plan_moe

    def plan_moe(terms: Terms, *arguments: Any) -> MoePlan | None:
        budget_bytes = terms.holdings.total_bytes + model_bytes // 4
        return real(replace(terms, budget_bytes=budget_bytes), *arguments)

    def all_but_some(segments: Sequence[Sequence[int]], fewest: int) -> int:
        return max(fewest, len({chunk for segment in segments for chunk in segment}) - 245)

    with places(all_but_some) if what == "visits" else fewest_frames(0.0):
        if what == "experts":
            assemble.plan_moe = plan_moe
        try:
            yield
        finally:
            assemble.plan_moe = real


def times_lent(engine: SliceEngine) -> int:
    """How often buffers were lent to weights for what is assigned now."""
    lent_residency = engine._assignment.lent_residency if engine._assignment else None
    return lent_residency.loans.times_granted if lent_residency else 0


def run_slices(together: Together, batches: Sequence[Sequence[BatchToken]]) -> list[np.ndarray]:
    """Return the logits of each batch; a graph that is not known yet is learned, and all is said again."""
    for _ in range(8):
        rows: list[np.ndarray] = []
        try:
            for batch in batches:
                rows.append(together.decode(batch))
            return rows
        except GraphChanged:
            shape = PassShape(len(batches[len(rows)]), 1)
            together.learn(shape)
            for engine in together.engines.values():
                engine.decoder.clear()
    raise AssertionError("the graph never became known")


def say_known(together: Together, script: Callable[[Talk], None]) -> tuple[Talk, list[Witness]]:
    """Run `script`, learning the graphs of its passes first; return what was said, and who looked on, of each engine.

    The engines have room to lend.
    """
    for _ in range(MOST_MAPS):
        witnesses = [Witness(engine) for engine in together.engines.values()]
        talk = Talk(together, lambda found=witnesses: [witness.look() for witness in found])  # type: ignore[arg-type]
        try:
            script(talk)
            return talk, witnesses
        except GraphChanged:
            together.learn(together.last_shape)
            together.clear()
    raise AssertionError("the graph never became known")


def compare(path: Path, counts: Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
    common = {"context_tokens": 256, "micro_batch_tokens": 32, "threads": 1, "check_file": False}
    prefill, decode = options["prefill"], options["decode"]
    with_plain = Engine.open(path, ModelConfig(backend="llama.cpp", **common))
    tokens = np.random.default_rng(0).integers(1, with_plain.model.vocabulary, prefill + decode).tolist()
    batches = (alternating if options["lends"] or options["visits"] else batches_of)(tokens, prefill, 32)
    wanted = [with_plain.decoder.decode(batch).copy() for batch in batches]
    with_plain.close()
    names = [chr(ord("a") + i) for i in range(len(counts))]
    with least_lent() if options["lends"] or options["visits"] else contextlib.nullcontext():
        engines = {
            n: SliceEngine.open(path, ModelConfig(memory="8GiB", **common, chunk_bytes=CHUNK_BYTES)) for n in names
        }
    layout = engines["a"].layout
    owners = owners_of(len(layout.units), counts)
    rooms = [(options["streams"] or options["lends"], fewest_frames(0.0)), (options["visits"], places(most_places))]
    with next((room for is_wanted, room in rooms if is_wanted), contextlib.nullcontext()):
        together = Together(engines, owners)
    found = run_slices(together, batches)
    streamed = [engine.plan.streamed_bytes_per_pass for engine in engines.values()]
    again = None
    if options["again"]:  # other owners, in the same engines
        turned = ["a", *reversed(owners[1:-1]), "a"]
        again = run_slices(Together(engines, turned), batches)
    result = {
        "units": len(layout.units),
        "cut_bytes": [unit.entry_bytes for unit in layout.units],
        "rows": len(wanted),
        "different_rows": differing(wanted, found),
        "different_again": differing(wanted, again) if again is not None else 0,
        "sent_bytes": sum(transport.sent_bytes for transport in together.transports.values()),
        "streamed_bytes": streamed,
        "lent_bytes": [engine.plan.lent_bytes for engine in engines.values()],
        "holds_stage_visits": [
            getattr(engine._supply.streams[0], "holds_stage_visits", False) for engine in engines.values()
        ],
        "times_lent": [times_lent(engine) for engine in engines.values()],
        "pinned_bytes": [engine.plan.pinned_bytes for engine in engines.values()],
        "kv_bytes": [engine.plan.kv_bytes for engine in engines.values()],
        "expert_bytes": [engine.plan.expert_bytes for engine in engines.values()],
        "finite": bool(all(np.isfinite(row).all() for row in wanted)),
    }
    for engine in engines.values():
        engine.close()
    return result


def differing(wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> int:
    return sum(not np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--owners", default="2,1")
    parser.add_argument("--prefill", type=int, default=70)
    parser.add_argument("--decode", type=int, default=6)
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--visits", action="store_true")
    parser.add_argument("--lends", action="store_true")
    parser.add_argument("--again", action="store_true")
    arguments = vars(parser.parse_args())
    print(json.dumps(compare(arguments["model"], [int(n) for n in arguments["owners"].split(",")], arguments)))


if __name__ == "__main__":
    main()
