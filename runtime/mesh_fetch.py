"""What devices of a run have to fetch of its model: what that costs a plan, and the fetching itself, watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edge_run.base.errors import ProtocolError
from edge_run.base.mesh import Document, LinkRate, Mesh
from edge_run.base.units import format_size
from edge_run.partition.mesh_plan import MeshPlan
from edge_run.runtime.mesh_failover import Refused

POLL_S, TELL_S = 0.25, 3.0
Orders = Callable[[dict[str, Document]], Mapping[str, Document]]


@dataclass(frozen=True, slots=True)
class Lack:
    """What a device lacks: bytes of each unit. most_bytes: it may hold of weights."""

    missing: tuple[int, ...]
    most_bytes: int


class MeshFetch:
    """The lacks of the devices of one run. Not thread-safe."""

    def __init__(self, mesh: Mesh, n_units: int, say: Callable[[str], None], check: Callable[[], None]) -> None:
        """`check` runs while devices fetch, and may raise to stop waiting; `say` is told how far they are."""
        self._mesh, self._n_units, self._say, self._check = mesh, n_units, say, check
        self.lacks: dict[str, Lack] = {}

    def note(self, node: str, answer: Document) -> None:
        """Take in what `node` said of itself. Raises ProtocolError for what cannot be."""
        self.lacks.pop(node, None)
        missing, most_bytes = answer.get("missing_bytes"), answer.get("most_weight_bytes")
        if missing is None:
            return
        if (
            not isinstance(missing, list | tuple)
            or len(missing) != self._n_units
            or not all(isinstance(size, int) and size >= 0 for size in (*missing, most_bytes))
        ):
            raise ProtocolError(f"{node} says that it lacks {str(missing)[:80]}: cannot be")
        sizes = [size for size in missing if isinstance(size, int)]
        self.lacks[node] = Lack(tuple(sizes), int(str(most_bytes)))

    def missing_bytes(self, plan: MeshPlan, node: str) -> int:
        """Return what `node` has to fetch under `plan`."""
        lack = self.lacks.get(node)
        return sum(m for m, owner in zip(lack.missing, plan.owners, strict=True) if owner == node) if lack else 0

    def seconds(self, plan: MeshPlan, node: str, rate: LinkRate) -> float:
        """Return how long `node` will fetch under `plan`, when the way to it is one of `rate`."""
        return self.missing_bytes(plan, node) / max(1.0, rate.bytes_per_s)

    def run(self, plan: MeshPlan, order: Document, give_orders: Orders) -> Refused | None:
        """Have the devices of `plan` fetch what they lack, and wait for it; return which of them cannot.

        Raises whatever `give_orders` does for a device that does not obey.
        """
        nodes = [node for node in plan.nodes if node in self.lacks]
        if not nodes:
            return None
        providers = [node for node in (self._mesh.node, *plan.nodes) if node not in self.lacks]
        fetch: Document = {**order, "order": "fetch", "providers": list(dict.fromkeys(providers))}
        answers = give_orders(dict.fromkeys(nodes, fetch))
        waiting = [node for node in nodes if answers[node].get("wanted_bytes")]
        self._tell(waiting, answers)
        told_s = started_s = time.monotonic()
        while waiting:
            time.sleep(POLL_S)
            self._check()
            answers = give_orders({node: {"order": "status"} for node in waiting})
            states = {node: _state(node, answers[node]) for node in waiting}
            if refusal := _refusal(states, [node for node in plan.nodes if node != self._mesh.node]):
                return refusal
            waiting = [node for node, state in states.items() if not state.get("is_over")]
            if waiting and time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                self._tell(waiting, states)
            for node in states.keys() - set(waiting):
                self._say(f"{self._name(node)} has its layers, after {time.monotonic() - started_s:.1f} s")
        for node in nodes:
            lack = self.lacks[node]
            left = (0 if o == node else m for m, o in zip(lack.missing, plan.owners, strict=True))
            self.lacks[node] = Lack(tuple(left), lack.most_bytes)
        return None

    def _tell(self, nodes: Sequence[str], states: Mapping[str, Document]) -> None:
        for node in nodes:
            done, wanted = (_size(states[node].get(key)) for key in ("done_bytes", "wanted_bytes"))
            self._say(f"{self._name(node)} fetches {format_size(done)} of {format_size(wanted)}")

    def _name(self, node: str) -> str:
        return next((member.name for member in self._mesh.members() if member.node == node), node)


def _state(node: str, answer: Document) -> Document:
    state = answer.get("fetch")
    if not isinstance(state, Mapping):
        raise ProtocolError(f"{node} says nothing of what it fetches; the devices have different versions", node=node)
    return state


def _refusal(states: Mapping[str, Document], others: Sequence[str]) -> Refused | None:
    """Return which device cannot take part: one of `others` that sent wrong bytes, or one that does not get its own."""
    for node, state in states.items():
        found = state.get("wrong")
        for wrong in found if isinstance(found, list | tuple) else ():
            if wrong in others:
                return Refused(str(wrong), f"{node} got other bytes from it than the model has")
    for node, state in states.items():
        if why := state.get("why"):
            return Refused(node, f"it cannot fetch its layers: {why}")
    return None


def _size(value: object) -> int:
    return value if isinstance(value, int) else 0
