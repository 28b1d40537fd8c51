"""Measures the links between the devices of a run before a plan is made, and estimates what a hop costs.

This device measures its own links and orders the other devices to measure theirs. A link that was measured lately is
not measured again. A link that was not measured in time counts as its opposite direction does, or as a fast network.
A link on which no device answers is a hop that no plan takes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edge_run.base.errors import DeviceLost, MeshError
from edge_run.base.fields import MOST_RATE, MOST_S, Document, is_name, is_number, plain
from edge_run.base.interrupt import go_on
from edge_run.base.mesh import LinkRate, Mesh
from edge_run.partition.mesh_ring import Hop

logger = logging.getLogger(__name__)

HANDLING_S = 0.0008  # an activation taken, handed on and computed with, besides the network; live rates correct it
USUAL_RATE = LinkRate("", 0.0004, 100e6)
FRESH_S = 600.0
MEASURE_TIMEOUT_S, ORDER_TIMEOUT_S = 4.0, 6.0
MOST_WHY = 300  # characters of another device's words
UNREACHED_S = 60.0  # what a hop on which nobody answers is taken to cost
APART_S = 300.0  # before a link is measured anew on which a pass found nobody
TOLERANCE = 1.2  # times what a hop was expected to take, before all links are measured anew

GiveEach = Callable[[dict[str, Document], float], tuple[Mapping[str, Document], Mapping[str, Exception]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a device found of its links to others.

    rates: of the links to devices that it reaches.
    unreached: why it does not reach the others.
    """

    rates: Mapping[str, LinkRate]
    unreached: Mapping[str, str]


class MeasuredLinks:
    """The links between devices as they were measured. Not thread-safe."""

    def __init__(
        self, mesh: Mesh, give_each: GiveEach, activation_bytes: int, check: Callable[[], None] = go_on
    ) -> None:
        """give_each: gives orders to several nodes at once, and returns the answers, and what failed.

        activation_bytes: what is handed on for one token.
        check: runs while links are measured, and may raise to stop.
        """
        self._mesh, self._give_each, self._activation_bytes = mesh, give_each, activation_bytes
        self._check = check
        self._rates: dict[tuple[str, str], LinkRate] = {}
        self._unreached: dict[tuple[str, str], str] = {}
        self._tried: set[tuple[str, str]] = set()
        self._apart_s: dict[tuple[str, str], float] = {}  # when a pass found that
        self.handling_s = HANDLING_S

    def measure(self, nodes: Sequence[str], fresh_s: float = FRESH_S) -> None:
        """Measure the links between `nodes`, this one among them, those aside that this run has tried to measure.

        fresh_s: how old a device's own figures may be. What cannot be measured in time stays unknown. Raises the first
        failure of a device, which is asked again the next time.
        """
        here, since_s = self._mesh.node, time.monotonic() - APART_S
        self._tried -= {pair for pair, noted_s in self._apart_s.items() if noted_s < since_s}
        self._apart_s = {pair: noted_s for pair, noted_s in self._apart_s.items() if noted_s >= since_s}
        asked = {
            node: [other for other in nodes if other != node and (node, other) not in self._tried] for node in nodes
        }
        orders: dict[str, Document] = {
            node: {"order": "measure", "nodes": others, "fresh_s": fresh_s}
            for node, others in asked.items()
            if others and node != here
        }
        trying = {(node, other) for node, others in asked.items() for other in others}
        self._tried |= trying
        try:
            if asked.get(here):
                self._keep(here, measure_links(self._mesh, asked[here], MEASURE_TIMEOUT_S, fresh_s, self._check))
            answers, failures = self._give_each(orders, ORDER_TIMEOUT_S)
        except BaseException:  # it was stopped: it is tried another time
            self._tried -= trying
            raise
        for node, answer in answers.items():
            self._keep(node, read_measured(answer))
        self._tried -= {pair for pair in trying if pair[0] in failures}
        for failure in failures.values():
            raise failure

    def forget(self, node: str) -> set[str]:
        """A device is there anew: what was tried of its links says nothing.

        Return whom it did not reach, or was not reached from, itself among them; nobody where all of its links worked.
        """
        apart = {pair for pair in self._unreached if node in pair}
        self._tried = {pair for pair in self._tried if node not in pair}
        self._unreached = {pair: why for pair, why in self._unreached.items() if pair not in apart}
        return {one for pair in apart for one in pair}

    def note_apart(self, source: str, target: str) -> None:
        """A device did not reach another one in a pass: for a while no plan has it hand on to that one."""
        self._tried.add((source, target))
        self._apart_s[source, target] = time.monotonic()
        self._unreached[source, target] = "it was not reached in a pass"

    def why_apart(self, node: str) -> str:
        """Return why a device and this one do not reach each other, an empty string where they do, or may do."""
        here = self._mesh.node
        there, back = self._unreached.get((here, node)), self._unreached.get((node, here))
        if not there and not back:
            return ""
        which = (
            f"its data link is not reached from here ({there})"
            if there
            else f"it does not reach this device's data link ({back})"
        )
        return (
            f"{which}; `edge-run mesh join --listen 0.0.0.0` opens a device's data link to the network, "
            "`edge-run mesh doctor` says more"
        )

    def apart(self, owners: Sequence[str]) -> tuple[str, str] | None:
        """Return two devices of a plan that hand activations on and do not reach each other; None where all do."""
        return next((pair for pair in itertools.pairwise(owners) if pair in self._unreached), None)

    def rate(self, source: str, target: str) -> LinkRate:
        """Return what is known of a link."""
        return self._rates.get((source, target)) or self._rates.get((target, source)) or USUAL_RATE

    def hop(self, source: str, target: str) -> Hop:
        """Return what an activation takes from a node to another: a token's, and a token's share of a prompt's."""
        if (source, target) in self._unreached:
            return Hop(UNREACHED_S)
        rate = self.rate(source, target)
        bulk_s = self._activation_bytes / max(1.0, rate.bytes_per_s)
        return Hop(self.handling_s + rate.round_trip_s / 2 + bulk_s, bulk_s)

    def correct(self, owners: Sequence[str], hop_s: float, nodes: Sequence[str] = ()) -> None:
        """The hops of a plan took `hop_s` in the mean; what the links do not explain is handling.

        nodes: of any plan; links between them that were found to be of no use are measured anew after a while.
        """
        self.measure(nodes)
        pairs = self._hops(owners)
        if pairs and hop_s > TOLERANCE * self._mean_s(pairs):
            self._tried.clear()
            self.measure(sorted(set(owners)), fresh_s=FRESH_S / 10)
            pairs = self._hops(owners)
        if pairs:
            self.handling_s = max(0.0, self.handling_s + hop_s - self._mean_s(pairs))

    def speeds(self, source: str, targets: Sequence[str]) -> dict[str, float]:
        """Return bytes a second from a node to others, where the link was measured, in one direction at least."""
        known = {target for target in targets if {(source, target), (target, source)} & self._rates.keys()}
        return {target: self.rate(source, target).bytes_per_s for target in known}

    def _hops(self, owners: Sequence[str]) -> list[tuple[str, str]]:
        return [pair for pair in itertools.pairwise(owners) if len(set(pair)) == 2 and pair not in self._unreached]

    def _mean_s(self, pairs: Sequence[tuple[str, str]]) -> float:
        return sum(self.hop(a, b).token_s for a, b in pairs) / len(pairs)

    def _keep(self, source: str, found: Measured) -> None:
        """Keep what `source` found of the links that it was asked for."""
        for target, rate in found.rates.items():
            if (source, target) in self._tried:
                self._rates[source, target] = rate
                self._unreached.pop((source, target), None)
        for target, why in found.unreached.items():
            if (source, target) in self._tried:
                self._unreached[source, target] = why


def measure_links(
    mesh: Mesh, nodes: Sequence[str], timeout_s: float, fresh_s: float, check: Callable[[], None] = go_on
) -> Measured:
    """Measure the links from this device to `nodes`, as many as can be in time. `check` may raise to stop."""
    until = time.monotonic() + timeout_s
    rates: dict[str, LinkRate] = {}
    unreached: dict[str, str] = {}
    for node in nodes:
        left_s = until - time.monotonic()
        if node == mesh.node or left_s <= 0:
            continue
        try:
            rates[node] = mesh.link.measure(node, timeout_s=left_s, fresh_s=fresh_s, check=check)
        except DeviceLost as error:
            if time.monotonic() < until:  # else there was not the time to find out
                unreached[node] = error.message.replace("tcp://", "")
        except MeshError as error:
            logger.info("the link to node %s was not measured: %s", node, error)
    return Measured(rates, unreached)


def measured_document(found: Measured, why: str = "") -> Document:
    """Return measured links as an answer to an order. why: what is said of each that is not reached, if not its own."""
    links = {node: [rate.round_trip_s, rate.bytes_per_s] for node, rate in found.rates.items()}
    return {"links": links, "unreached": {node: why or own for node, own in found.unreached.items()}}


def read_measured(answer: Document) -> Measured:
    """Return the measured links of an answer; what is malformed is left out."""
    links, unreached = answer.get("links"), answer.get("unreached")
    rates = {}
    for node, values in links.items() if isinstance(links, Mapping) else ():
        if isinstance(values, (list, tuple)) and len(values) == 2 and is_name(node):
            time_s, bytes_per_s = values
            if is_number(time_s, 0.0, MOST_S) and is_number(bytes_per_s, 0.0, MOST_RATE):
                rates[node] = LinkRate("", float(time_s), max(1.0, float(bytes_per_s)))
    why = unreached.items() if isinstance(unreached, Mapping) else ()
    return Measured(rates, {node: plain(str(text), MOST_WHY) for node, text in why if is_name(node)})
