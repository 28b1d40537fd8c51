"""Checks of a mesh for `mesh doctor`: the broker, the clocks, the keys, the links to each member. Changes nothing."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from edge_run.base.errors import EdgeRunError, NotTrusted, ProtocolError, reason_of
from edge_run.base.fields import Document
from edge_run.base.mesh import Member, names_apart
from edge_run.devices.host.findings import NOTE, OK, PROBLEM, Finding, Report
from edge_run.devices.link.hosts import is_loopback
from edge_run.devices.link.places import may_try
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, known_cluster, open_mesh
from edge_run.devices.mesh.watch import links_of
from edge_run.devices.messages.envelope import CameAgain, ForeignMessage, ImpossibleEpoch, OtherVersion, StaleClock
from edge_run.devices.messages.refusals import Refusals
from edge_run.devices.presence.membership import IDLE

LISTEN_S = IDLE.heartbeat_s + 1.0  # whoever does not know us is heard at his next heartbeat
PLACE_S = 2.0  # for which an address is tried
SLOW_BYTES_PER_S = 10e6


def examine(folder: Path, version: str, broker: str | None = None, listen_s: float = LISTEN_S) -> Report:
    """Return what there is to say about this device's mesh. version: of this edge-run. Raises nothing of ours."""
    try:
        cluster = known_cluster(folder)
    except EdgeRunError as error:
        return Report((Finding("cluster", PROBLEM, str(error), "edge-run mesh init, or edge-run mesh join LINE"),))
    findings = [Finding("cluster", OK, f"{cluster.id}, kept in {folder}")]
    started_s = time.monotonic()
    try:
        node = open_mesh(MeshConfig(folder, broker, is_watching=True))
    except EdgeRunError as error:
        return Report((*findings, Finding("broker", PROBLEM, str(error))))
    try:
        took_s = time.monotonic() - started_s
        time.sleep(listen_s)
        findings.append(_broker(node, took_s))
        with node.held() as state:
            members, loads, deaf = state.members(), dict(state.loads), dict(state.deaf)
            refusals = state.refusals.copy()
            links = {one.node: where[1] for one in members if (where := state.membership.link_of(one.node))}
        names = names_apart(members)
        findings += _clocks(refusals, names)
        findings += _refusals(refusals, cluster.id, names)
        findings += _versions(members, version, names)
        findings.append(_presence(names))
        findings += _deaf(deaf, names)
        findings += _reached(links, names)
        findings += _rates(names, loads)
    finally:
        node.close()
    return Report(tuple(findings))


def _broker(node: LocalNode, took_s: float) -> Finding:
    with node.held() as state:
        connections, is_heard = state.connections, state.is_heard
    if connections > 1 or not node.is_connected:
        text = f"{node.broker}: dropped the connection while we looked on ({node.problem or 'it is back'})"
        return Finding(
            "broker", PROBLEM, text, "see its log: a limit of connections, two clients of one id, the network"
        )
    if not is_heard:
        text = f"{node.broker}: takes messages and does not pass them on"
        return Finding("broker", PROBLEM, text, "its access list must allow edge/v1/# to this user: see docs/mesh.md")
    return Finding("broker", OK, f"{node.broker}: answers, connected in {took_s * 1e3:.0f} ms")


def _clocks(refusals: Refusals, names: Mapping[str, str]) -> list[Finding]:
    if not refusals.skews_s:
        return [Finding("clocks", OK, "nobody's is off by more than is allowed")]
    return [
        Finding(
            "clocks",
            PROBLEM,
            f"{_name(node, names)}: its clock is {abs(skew_s):,.0f} s "
            f"{'ahead of' if skew_s > 0 else 'behind'} this device's",
            "set both: timedatectl set-ntp true",
        )
        for node, skew_s in refusals.skews_s.items()
    ]


def _refusals(refusals: Refusals, cluster: str, names: Mapping[str, str]) -> list[Finding]:
    """Messages that were refused, and of whom."""
    findings = [Finding("keys", OK, "every message was a member's")]
    if stranger := refusals.last(NotTrusted, besides=(StaleClock, CameAgain)):
        text = f"{refusals.counts[NotTrusted] + refusals.counts[ForeignMessage]} messages refused; "
        advice = f"a device that should be in {cluster} and has another line: on it, edge-run mesh join LINE --replace"
        findings = [Finding("keys", PROBLEM, text + _told(stranger, names), advice)]
    same = "the same edge-run on every device: in its checkout, git pull, and pip install -e '.[mesh]'"
    if lie := refusals.last(ImpossibleEpoch):
        advice = "that device's program was changed, or its clock is wrong: see to it, or leave it out of the cluster"
        findings.append(Finding("lease", PROBLEM, _told(lie, names), advice))
    elif other := refusals.last(OtherVersion):
        findings.append(Finding("versions", PROBLEM, _told(other, names), same))
    elif count := refusals.count(ProtocolError):
        findings.append(Finding("messages", PROBLEM, f"{count} malformed messages refused", same))
    return findings


def _told(error: NotTrusted | ProtocolError, names: Mapping[str, str]) -> str:
    """Return what is wrong, with devices called what people call them."""
    owner = f", {_name(error.owner, names)}" if isinstance(error, ForeignMessage) else ""
    return (f"{_name(error.node, names)}: " if error.node else "") + error.message + owner


def _name(node: str, names: Mapping[str, str]) -> str:
    return names.get(node, f"node {node}")


def _versions(members: tuple[Member, ...], own: str, names: Mapping[str, str]) -> list[Finding]:
    same = "the same on every device"
    return [
        Finding("versions", NOTE, f"{names[one.node]}: has edge-run {version}, this is {own}", same)
        for one in members
        if isinstance(version := one.capabilities.get("edge_run"), str) and version != own
    ]


def _presence(names: Mapping[str, str]) -> Finding:
    if not names:
        return Finding("devices", NOTE, "nobody is there", "edge-run mesh join, on each device that is to take part")
    return Finding("devices", OK, ", ".join(sorted(names.values())))


def _deaf(deaf: Mapping[str, int], names: Mapping[str, str]) -> list[Finding]:
    """Members that had to connect anew since the broker handed them nothing."""
    return [
        Finding(
            "broker",
            PROBLEM,
            f"{name}: did not hear itself through the broker, and connected anew, {times} times since it started",
            "another client may use its id: a broker with passwords and the access list of docs/mesh.md forbids that",
        )
        for node, name in names.items()
        if (times := deaf.get(node))
    ]


def _reached(links: Mapping[str, Document], names: Mapping[str, str]) -> list[Finding]:
    """Try each address that each member announced."""
    findings = []
    with ThreadPoolExecutor(16) as pool:
        for node, name in names.items():
            places = [str(place) for place in list(links.get(node, {}).get("places") or ())]  # type: ignore[arg-type]
            key = str(links.get(node, {}).get("key"))
            times_s = dict(zip(places, pool.map(partial(_try, key), places), strict=True))
            findings.append(_reached_by(name, times_s))
    return findings


def _reached_by(name: str, times_s: dict[str, float | str]) -> Finding:
    topic = f"link to {name}"
    reached = {place: time_s for place, time_s in times_s.items() if isinstance(time_s, float)}
    missed = [f"{place.removeprefix('tcp://')} {why}" for place, why in times_s.items() if isinstance(why, str)]
    if not times_s:
        return Finding(topic, NOTE, "it announced no address for the data link")
    if reached:
        best = min(reached, key=lambda place: reached[place])
        text = f"{best.removeprefix('tcp://')} in {reached[best] * 1e3:.2f} ms"
        others = f"; {len(missed)} other network cards do not: {', '.join(missed)}" if missed else ""
        return Finding(topic, OK, text + others)
    if all(is_loopback(urlsplit(place).hostname or "") for place in times_s):
        return Finding(topic, PROBLEM, "it listens to itself only", "edge-run mesh join --listen 0.0.0.0, on it")
    ports = ", ".join(sorted({str(urlsplit(place).port) for place in times_s}))
    keeping = "edge-run mesh join --port N keeps it the same, that of runs being N + 1"
    advice = f"let port {ports} through on it ({keeping}), or another --listen"
    return Finding(topic, PROBLEM, f"no address answers: {', '.join(missed)}", advice)


def _try(key: str, place: str) -> float | str:
    """Return how long it took to connect, or why it could not be done."""
    parts = urlsplit(place)
    try:
        if not may_try(key, place):
            return "is an address of this device, at which that one does not listen"
        started_s = time.monotonic()
        with contextlib.closing(socket.create_connection((str(parts.hostname), int(parts.port or 0)), PLACE_S)):
            return time.monotonic() - started_s
    except TimeoutError:
        return "does not answer (a firewall?)"
    except OSError as error:
        return f"({reason_of(error)})"


def _rates(names: Mapping[str, str], loads: dict[str, Document]) -> list[Finding]:
    """Links that members measured, and that slow everybody."""
    findings = []
    for node, load in loads.items():
        for link in links_of(load):
            if link.bytes_per_s < SLOW_BYTES_PER_S:
                pair = f"{_name(node, names)} to {_name(link.node, names)}"
                text = f"{pair}: {link.bytes_per_s / 1e6:.1f} MB/s by {link.place}"
                findings.append(Finding("links", NOTE, text, "a cable, or --listen with the address of a faster card"))
    return findings
