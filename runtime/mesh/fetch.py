"""Has the devices of a run fetch the weights that they lack, watches them, and estimates how long they will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edge_run.base.error_codes import read_error
from edge_run.base.errors import EdgeRunError, ProtocolError, lacks_room
from edge_run.base.fields import MOST_BYTES, Document, Fields
from edge_run.base.mesh import LinkRate, Mesh
from edge_run.base.units import format_size
from edge_run.partition.mesh_plan import MeshPlan
from edge_run.runtime.mesh.failover import LessRoom, Refused
from edge_run.runtime.mesh.offers import OTHER_VERSIONS
from edge_run.runtime.mesh.orders import STALL_S, StallWatch
from edge_run.tiers.pieces import PIECE_BYTES

POLL_S, TELL_S = 0.25, 3.0
LEAST_FETCHED_BYTES = 2 * PIECE_BYTES  # in STALL_S: a piece has 20 s to come, so that what goes on is faster
MOST_NODES, MOST_PROVIDERS = 256, 64  # that a device may name; that an order may
Orders = Callable[[dict[str, Document]], Mapping[str, Document]]


@dataclass(frozen=True, slots=True)
class Lack:
    """What a device lacks of a model.

    missing: bytes of each unit.
    most_bytes: of weights that it may hold.
    """

    missing: tuple[int, ...]
    most_bytes: int


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far a device is.

    why: it cannot go on; empty where it can.
    error: that it met with, where that is why.
    failures: why other devices send it no more.
    wrong: devices that sent it other bytes than the model has.
    """

    wanted_bytes: int
    done_bytes: int
    is_over: bool
    why: str
    error: EdgeRunError | None
    failures: Mapping[str, str]
    wrong: tuple[str, ...]

    @classmethod
    def of(cls, fields: Fields) -> _Progress:
        """Return what a device says of itself. Raises ProtocolError."""
        wanted, done = (
            fields.integer(name, 0, MOST_BYTES) if fields.has(name) else 0 for name in ("wanted_bytes", "done_bytes")
        )
        wrong = fields.names("wrong", 0, MOST_NODES) if fields.has("wrong") else ()
        told = fields.table("failures") if fields.has("failures") else {}
        said = Fields(told, f"{fields.what}, in failures", fields.node)
        failures = {node: said.words(node) for node in said.document}
        error = None
        if fields.has("error"):
            error = read_error(Fields(fields.table("error"), f"{fields.what}, in error", fields.node))
        return cls(wanted, done, fields.flag("is_over"), fields.words("why"), error, failures, wrong)


class MeshFetch:
    """What the devices of one run lack, and the fetching of it. Not thread-safe."""

    def __init__(self, mesh: Mesh, n_units: int, say: Callable[[str], None], check: Callable[[], None]) -> None:
        """`check` runs while devices fetch, and may raise to stop waiting; `say` is told how far they are."""
        self._mesh, self._n_units, self._say, self._check = mesh, n_units, say, check
        self.lacks: dict[str, Lack] = {}

    def note(self, node: str, answer: Document) -> None:
        """Take in what `node` said of itself. Raises ProtocolError for what cannot be."""
        self.lacks.pop(node, None)
        fields = Fields(answer, "its answer", node)
        if fields.has("missing_bytes"):
            missing = fields.integers("missing_bytes", self._n_units, MOST_BYTES)
            self.lacks[node] = Lack(missing, fields.integer("most_weight_bytes", 0, MOST_BYTES))

    def seconds(self, plan: MeshPlan, node: str, rate: LinkRate) -> float:
        """Return how long `node` will fetch under `plan`, over a link of `rate`."""
        missing = self.lacks[node].missing if node in self.lacks else (0,) * self._n_units
        missing_bytes = sum(size for size, owner in zip(missing, plan.owners, strict=True) if owner == node)
        return missing_bytes / max(1.0, rate.bytes_per_s)

    def run(self, plan: MeshPlan, order: Document, give_orders: Orders) -> Refused | LessRoom | None:
        """Have the devices of `plan` fetch what they lack, and wait for it; return which of them cannot, or not all.

        Raises whatever `give_orders` does for a device that does not obey.
        """
        nodes = [node for node in plan.nodes if node in self.lacks]
        if not nodes:
            return None
        providers = dict.fromkeys(node for node in (self._mesh.node, *plan.nodes) if node not in self.lacks)
        fetch: Document = {**order, "order": "fetch", "providers": list(providers)[:MOST_PROVIDERS]}
        answers = give_orders(dict.fromkeys(nodes, fetch))
        progress = {node: _Progress.of(Fields(answers[node], "its answer", node)) for node in nodes}
        waiting = [node for node in nodes if progress[node].wanted_bytes]
        others = [node for node in plan.nodes if node != self._mesh.node]
        self._tell(waiting, progress)
        told_s = started_s = time.monotonic()
        watches = {node: StallWatch(LEAST_FETCHED_BYTES, 0, started_s) for node in waiting}
        while waiting:
            time.sleep(POLL_S)
            self._check()
            answers = give_orders({node: {"order": "status"} for node in waiting})
            progress = {node: _progress_of(node, answers[node]) for node in waiting}
            if refusal := _refusal(progress, others, self._name):
                return refusal
            waiting = [node for node, one in progress.items() if not one.is_over]
            for node in waiting:
                done_bytes = progress[node].done_bytes
                if watches[node].note(done_bytes, time.monotonic()):
                    at = f"at {format_size(done_bytes)}"
                    return Refused(node, f"it has fetched hardly anything for {STALL_S:.0f} s, {at}")
            if waiting and time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                self._tell(waiting, progress)
            for node in progress.keys() - set(waiting):
                self._say(f"{self._name(node)} has its layers, after {time.monotonic() - started_s:.1f} s")
        for node in nodes:
            lack = self.lacks[node]
            left = (0 if o == node else m for m, o in zip(lack.missing, plan.owners, strict=True))
            self.lacks[node] = Lack(tuple(left), lack.most_bytes)
        return None

    def _tell(self, nodes: Sequence[str], progress: Mapping[str, _Progress]) -> None:
        for node in nodes:
            done, wanted = format_size(progress[node].done_bytes), format_size(progress[node].wanted_bytes)
            self._say(f"{self._name(node)} fetches {done} of {wanted}")

    def _name(self, node: str) -> str:
        return next((member.name for member in self._mesh.members() if member.node == node), node)


def _progress_of(node: str, answer: Document) -> _Progress:
    one = answer.get("fetch")
    if not isinstance(one, Mapping):
        raise ProtocolError(f"says nothing of what it fetches; {OTHER_VERSIONS}", node=node)
    return _Progress.of(Fields(one, "what it fetches", node))


def _refusal(
    progress: Mapping[str, _Progress], others: Sequence[str], name: Callable[[str], str]
) -> Refused | LessRoom | None:
    """Return which device cannot take part: one of `others` that sent wrong bytes, or one that does not get its own.

    One whose drive is full can, with less. name: returns what people call a device.
    """
    for node, one in progress.items():
        for wrong in one.wrong:
            if wrong in others:
                return Refused(wrong, "it sent other bytes than the model has", node)
    for node, one in progress.items():
        if one.error is not None and lacks_room(one.error):
            return LessRoom(node, one.error)
        if one.why:
            whys = [one.why, *(f"{name(other)} {why}" for other, why in one.failures.items())]
            return Refused(node, f"it cannot fetch its layers: {'; '.join(whys)}")
    return None
