"""Spreads a model over a mesh: asks devices what they have, plans, and has them open their slices."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace

from edge_run.base.errors import EdgeRunError, wording
from edge_run.base.fields import Document, JsonValue, plain
from edge_run.base.mesh import HasLeft, Mesh, names_apart
from edge_run.base.mesh_status import MeshNode
from edge_run.partition.mesh_pipeline import faster_for_many, plan_pipeline
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_ring import Hops, plan_ring
from edge_run.partition.mesh_room import RoomBound, room_bound
from edge_run.runtime.decoding.driver import PassShape
from edge_run.runtime.fetch.fingerprint import Fingerprint, fingerprint
from edge_run.runtime.mesh.failover import OfLate, Refused
from edge_run.runtime.mesh.fetch import MeshFetch
from edge_run.runtime.mesh.links import MeasuredLinks
from edge_run.runtime.mesh.offers import (
    device_spec,
    differing,
    layout_hash,
    room_document,
    shared_settings,
)
from edge_run.runtime.mesh.orders import TELL_S, Failed, RunOrders, judged, reading_words
from edge_run.runtime.planning.experts import routed_read
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.tiers.pieces import PIECE_BYTES

PREPARE_TIMEOUT_S, ASSIGN_TIMEOUT_S = 120.0, 120.0
FETCH_TIMEOUT_S = 30.0  # of an order to fetch, which only begins it
PAYS_BACK_TOKENS = 100  # what a new plan costs, computing again what was said, is to be saved within so many tokens
FETCH_TOKENS = 1000  # of this run and later ones, which find there what was fetched


def unit_works(engine: SliceEngine) -> list[UnitWork]:
    """Return the units of `engine`'s model as the planner sees them."""
    shape = PassShape(1, 1)
    graph, layout, n_used = engine.maps[shape][0], engine.layout, engine.gguf.used_experts
    experts = {tensor.name: tensor.shape[2] for tensor in engine.gguf.tensors if len(tensor.shape) == 3}
    works = []
    for number, unit in enumerate(layout.units):
        nodes = graph[layout.start_of(number) : layout.start_of(number + 1)]
        routed = [read for node in nodes if (read := routed_read(node))]
        unused = sum(read.length * (1 - min(1, n_used / experts.get(read.name, 1))) for read in routed)
        works.append(UnitWork(unit.weight_bytes, unit.kept_bytes, max(0, unit.weight_bytes - int(unused))))
    return works


def _fingerprint(engine: SliceEngine, say: Callable[[str], None]) -> Fingerprint:
    """Return that of `engine`'s model; where this takes long, as it is read for the first time, `say` tells how far."""
    paths, size_bytes = [shard.path for shard in engine.gguf.shards], sum(s.size_bytes for s in engine.gguf.shards)
    read_bytes, told_s = 0, time.monotonic()

    def go_on() -> None:
        """A piece was read."""
        nonlocal read_bytes, told_s
        engine.interrupt.check()
        read_bytes = min(size_bytes, read_bytes + PIECE_BYTES)
        if time.monotonic() - told_s >= TELL_S:
            told_s = time.monotonic()
            say(reading_words("this device", plain(paths[0].name), read_bytes, size_bytes))

    return fingerprint(paths, engine.config.cache, go_on)


class LayerCoordinator:
    """Plans which device of a run computes which layers, and has them open their slices. Not thread-safe.

    fingerprint: of the model.
    works: the units of the model as the planner sees them.
    orders: to the devices of the run.
    fetch: what devices lack of the model.
    specs: of the devices that were asked, and of this one.
    links: what was measured between them.
    plan: the latest plan.
    most_in_flight: the passes that may be in flight, one of each group of sequences.
    """

    def __init__(
        self,
        mesh: Mesh,
        engine: SliceEngine,
        takes_any_numerics: bool,
        say: Callable[[str], None],
    ) -> None:
        """takes_any_numerics: devices with another numerics key take part, though tokens may then differ.

        say: is told what the user should see.
        """
        self._mesh, self._engine, self._takes_any, self._say = mesh, engine, takes_any_numerics, say
        self.orders = RunOrders(mesh, engine.interrupt.check, say)
        self._apart: set[tuple[str, str]] = set()  # who does not reach whom, as was said
        shards = engine.gguf.shards
        self.fingerprint = _fingerprint(engine, say)
        self._model: Document = {
            "model": self.fingerprint.model,
            "name": plain(shards[0].path.name),
            "shards": [[shard.size_bytes, shard.data_offset] for shard in shards],
            "settings": shared_settings(engine, takes_any_numerics),
        }
        self.works = unit_works(engine)
        self.most_in_flight = engine.most_in_flight if engine.most_in_flight > 1 and engine.maps.can_split_tail() else 1
        self.fetch = MeshFetch(mesh, len(self.works), say, engine.interrupt.check)
        self.specs: dict[str, DeviceSpec] = {}
        self._bounds: OfLate[RoomBound] = OfLate()  # by shortages that a device that is asked anew may not know of
        entry_bytes = max((unit.entry_bytes for unit in engine.layout.units[1:]), default=0)
        self.links = MeasuredLinks(mesh, self.orders.give_each, entry_bytes, engine.interrupt.check)
        self.plan = self.alone()

    def prepare(self, candidates: Sequence[str]) -> None:
        """Ask all candidates at once what they have. Raises Failed for the first that cannot take part."""
        self.specs = {n: s for n, s in self.specs.items() if n in candidates or n == self._mesh.node}
        self.ask({node for node in candidates if node not in self.specs or node not in self.orders.holding})

    def ask(self, nodes: AbstractSet[str]) -> None:
        """Ask `nodes` at once what they have, and leave the others as they are. Raises as `prepare` does."""
        self.orders.expect_release(nodes)
        for node in nodes:
            self.links.forget(node)
        answers = self.orders.prepare({"order": "prepare", **self._model}, nodes, PREPARE_TIMEOUT_S)
        for node, answer in answers.items():
            self._check(node, answer)
            judged(node, functools.partial(self.fetch.note, node, answer))
            found = judged(node, functools.partial(device_spec, node, answer))
            lack = self.fetch.lacks.get(node)
            found = replace(found, most_weight_bytes=lack.most_bytes if lack else None)
            for bound in self._bounds.of(node):
                found = bound.within(found)
            self.specs[node] = found

    def make_plan(self, fetch_tokens: int, *, may_group: bool) -> MeshPlan:
        """Return the best plan over the devices that were asked, and this one; this one alone where none fits.

        The links between them are measured before. Raises Failed for the first that is not there, or not reached.
        fetch_tokens: what a device has to fetch is worth it where it saves more within so many tokens.
        may_group: whether a plan with several passes in flight is of use.
        """
        node = self._mesh.node
        if node not in self.specs:
            self.specs[node] = device_spec(node, room_document(self._engine))
        self.links.measure(list(self.specs))
        for other in [other for other in self.specs if self.links.why_apart(other)]:
            self.links.forget(other)  # it may have been frozen for a moment
            self.links.measure([node, other])
            if why := self.links.why_apart(other):
                raise Failed(Refused(other, why, is_for_now=True))  # it may have, or announce, another address
        self.plan = self._best(self.specs, fetch_tokens, may_group=may_group) or self.alone()
        return self.plan

    def better(self, spent: Mapping[str, float], hop_s: float, *, may_group: bool) -> MeshPlan | None:
        """Return the best plan by what devices really took for a token, if it is another one than that in force.

        may_group: as of `make_plan`.
        """
        if len(self.specs) < 2:
            return None
        try:
            self.links.correct(self.plan.owners, hop_s, [*self.specs])
        except (Failed, HasLeft):  # who is gone is found out by the next batch
            return None
        for node, seconds in spent.items():
            if node in self.specs and seconds > 0:
                self.specs[node] = _corrected(self.specs[node], self.works, self.plan, seconds)
        found = self._best(self.specs, PAYS_BACK_TOKENS, may_group=may_group)
        return found if found and found.owners != self.plan.owners else None

    def take_less(self, node: str, error: EdgeRunError) -> None:
        """A device of the plan has less room than it seemed: `error`, which it met, says where."""
        if node in self.specs and node in self.plan.nodes:
            bound = room_bound(self.specs[node], self.plan, self.works, error)
            self._bounds.note(node, bound)
            self.specs[node] = bound.within(self.specs[node])

    def _best(self, specs: Mapping[str, DeviceSpec], fetch_tokens: int, *, may_group: bool) -> MeshPlan | None:
        """Return the best plan, having tried without those that would have to fetch, the slowest first."""
        left, best, least_s = dict(specs), None, math.inf
        while (plan := self._fastest(left, may_group=may_group)) is not None:
            costs = {
                node: self.fetch.seconds(plan, node, self.links.rate(self._mesh.node, node)) for node in plan.nodes
            }
            slowest = max(costs, key=lambda node: costs[node])
            if plan.token_s * fetch_tokens + costs[slowest] < least_s:
                best, least_s = plan, plan.token_s * fetch_tokens + costs[slowest]
            if not costs[slowest]:
                break
            del left[slowest]
        return best

    def _fastest(self, specs: Mapping[str, DeviceSpec], *, may_group: bool) -> MeshPlan | None:
        first = specs[self._mesh.node]
        others = [specs[node] for node in sorted(specs) if node != first.node]
        sequences = self._engine.config.sequences if self.most_in_flight > 1 else 1
        plan = _plan_over(self.works, [first, *others], self.links.hop, sequences, may_group=may_group)
        apart = self.links.apart(plan.owners) if plan else None
        if apart is None:
            return plan
        dropped = apart[0] if apart[1] == first.node else apart[1]
        if apart not in self._apart:
            self._apart.add(apart)
            names = names_apart(self._mesh.members())
            source, target, without = (names.get(node, node) for node in (*apart, dropped))
            self._say(f"{source} does not reach {target}: the run does without {without}")
        return self._fastest({node: spec for node, spec in specs.items() if node != dropped}, may_group=may_group)

    def forget_others(self) -> None:
        """Have the other devices asked anew what they have, and to open the model: it may be closed by now."""
        self.specs = {n: s for n, s in self.specs.items() if n == self._mesh.node}

    def alone(self) -> MeshPlan:
        """Return the plan of this device computing all; who comes back after that is asked anew."""
        self.forget_others()
        self.plan = MeshPlan((self._mesh.node,) * len(self.works), 1, 0.0, {})
        return self.plan

    def open(self, plan: MeshPlan, epoch: int) -> None:
        """Have the other devices open their slices, under `epoch`. Raises Failed."""
        order: Document = {
            "order": "assign",
            "epoch": epoch,
            "owners": list(plan.owners),
            "layout": layout_hash(self._engine.layout),
            "is_split": plan.most_in_flight > 1,
        }
        refusal = self.fetch.run(plan, order, lambda orders: self.orders.give(orders, FETCH_TIMEOUT_S))
        if refusal is not None:
            raise Failed(refusal)
        others = [node for node in plan.nodes if node != self._mesh.node]
        orders: dict[str, Document] = {
            node: {**order, "bytes_per_s": self.links.speeds(node, plan.nodes)} for node in others
        }
        self.orders.give(orders, ASSIGN_TIMEOUT_S)

    def describe(self) -> tuple[MeshNode, ...]:
        """Return who computes what."""
        names = names_apart(self._mesh.members())
        plan, units = self.plan, self._engine.layout.units
        return tuple(
            MeshNode(
                node=node,
                name=names.get(node, node),
                blocks=tuple(b for u, owner in zip(units, plan.owners, strict=True) if owner == node for b in u.blocks),
                streamed_bytes=plan.read_bytes.get(node, 0),
            )
            for node in plan.nodes
        )

    def plan_document(self) -> Document:
        """Return the plan for others to see."""
        layers: dict[str, JsonValue] = {
            part.node: [[first, last + 1] for first, last in runs(part.blocks)] for part in self.describe()
        }
        per_s = round(self.plan.tokens_per_s, 3) if self.plan.token_s else 0.0
        return {"model": plain(self._engine.gguf.shards[0].path.name), "layers": layers, "tokens_per_s": per_s}

    def _check(self, node: str, answer: Document) -> None:
        """Leave out a device that would compute something else. Raises Failed."""
        if answer.get("layout") != layout_hash(self._engine.layout):
            raise Failed(Refused(node, "it cuts the model in other places: another version of llama.cpp or edge-run"))
        others = differing(asdict(self._engine.loaded.numerics), answer.get("numerics"))
        if others and not self._takes_any:
            taken = wording("--mesh-any-numerics takes it", "MeshOptions(takes_any_numerics=True) takes it")
            raise Failed(Refused(node, f"its numerics differ ({', '.join(others)}), so tokens could; {taken}"))
        if others:
            name = names_apart(self._mesh.members()).get(node, node)
            self._say(f"{name} computes with other numerics ({', '.join(others)}): tokens may differ from one device's")


def _plan_over(
    works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: Hops, sequences: int, *, may_group: bool
) -> MeshPlan | None:
    """Return the fastest plan for as many answers at once; one without groups, if there is any, unless it `may_group`.

    With one pass in flight, a plan that was made for several is slower than one by which devices take turns.
    """
    ring = plan_ring(works, specs, hops)
    if sequences == 1 or (ring is not None and not may_group):
        return ring
    return faster_for_many(ring, plan_pipeline(works, specs, hops, sequences), sequences)


def plan_text(plan: MeshPlan, nodes: Sequence[MeshNode]) -> str:
    """Return a plan in words. nodes: who computes what by it."""
    return ", ".join(f"{node.name} computes {_layers(node.blocks)}" for node in nodes) + _speed(plan)


def _speed(plan: MeshPlan) -> str:
    """Return the speed of a plan in words."""
    alone = f"; {plan.tokens_per_s:.1f} tokens/s expected" if plan.token_s else ""
    n_groups = plan.most_in_flight
    return f"{alone} of one answer, {n_groups} groups of answers are computed at once" if n_groups > 1 else alone


def reading_s(plan: MeshPlan, works: Sequence[UnitWork], specs: Mapping[str, DeviceSpec]) -> float:
    """Return how long the first pass of `plan` waits for weights that stay, all devices reading at once."""
    seconds = [0.0]
    for node in plan.nodes:
        held = sum(w.weight_bytes for w, owner in zip(works, plan.owners, strict=True) if owner == node)
        if node in specs:
            seconds.append(max(0, held - plan.read_bytes.get(node, 0)) / specs[node].disk_bytes_per_s)
    return max(seconds)


def _corrected(known: DeviceSpec, works: Sequence[UnitWork], plan: MeshPlan, seconds: float) -> DeviceSpec:
    """Return a device as it was seen to be: at work for `seconds` a token."""
    if plan.has_away:  # that hangs on how long the text is
        return known
    used = sum(w.token_bytes for w, owner in zip(works, plan.owners, strict=True) if owner == known.node)
    streamed = plan.read_bytes.get(known.node, 0)
    if streamed and streamed / known.disk_bytes_per_s > used / known.compute_bytes_per_s:
        return replace(known, disk_bytes_per_s=max(1.0, streamed / max(seconds, plan.token_s)))
    return replace(known, compute_bytes_per_s=max(1.0, used / seconds))


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return blocks as ranges (first, last)."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][1] == block - 1:
            found[-1] = found[-1][0], block
        else:
            found.append((block, block))
    return found


def _layers(blocks: Sequence[int]) -> str:
    if not blocks:
        return "no layers"
    return "layers " + " ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs(blocks))
