"""What comes from other devices of a mesh: messages, bodies, links, lines."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from edge_run.base.units import KIB, MIB
from hostile import broken_document, dump, large_text
from hostile_target import LARGE_SHARE, Target, in_file, target


class _Mesh:
    """A member's state, and other members that say what they like: validly signed, whatever it is."""

    def __init__(self) -> None:
        from edge_run.devices.members.identity import make_identity
        from edge_run.devices.mesh.clocks import Clocks
        from edge_run.devices.mesh.state import MeshState
        from mesh_lists import Members, settle

        self.now_s = 1.7e9
        members = Members("mqtt://host", now_s=self.now_s)
        self.cluster, self._devices = members.cluster, itertools.cycle(members.devices)
        clocks = Clocks(lambda: self.now_s, lambda: self.now_s, random.Random(0))
        own = make_identity(lambda: self.now_s, members.founder)
        self.state = MeshState(own, self.cluster, "here", clocks, is_watching=False)
        self.state.connect(True)
        settle(self.state)
        self.identities: list[Any] = []
        self.writers: list[Any] = []
        for _ in range(4):
            self.join()
        self.number = 0

    def join(self) -> None:
        """Have another member in place of the one that was longest: what it said may have ended its incarnation."""
        from edge_run.devices.members.identity import make_identity
        from edge_run.devices.messages.envelope import Writer

        identity = make_identity(lambda: self.now_s, next(self._devices))
        self.identities = [*self.identities[-3:], identity]
        self.writers = [*self.writers[-3:], Writer(identity, self.cluster, lambda: self.now_s)]

    def seal(self, topic: Any, content: Callable[[bytes], bytes], epoch: int = 1) -> bytes:
        """Return an envelope signed by a member over the bytes that `content` makes of a valid text."""
        from edge_run.devices.messages import envelope as mesh_envelope

        canonical = mesh_envelope.canonical
        with mock.patch.object(mesh_envelope, "canonical", lambda fields: content(canonical(fields))):
            return self.writer.seal(topic, epoch, {})[0]

    @property
    def identity(self) -> Any:
        return self.identities[self.number % len(self.identities)]

    @property
    def writer(self) -> Any:
        return self.writers[self.number % len(self.writers)]

    def take_in(self, text: str, payload: bytes, sender: str | None = None) -> bool:
        """Have the state take a message in, and time pass; return whether it was let in."""
        state, before = self.state, self.state.refusals.total
        state.take_in(text, payload, is_kept=self.number % 5 == 0, sender=sender)
        self.now_s += 0.05
        if self.number % 50 == 0:
            self.join()
        state.pass_time()
        state.members()
        state.take_due()
        state.events.clear()
        for line in map(str, state.refusals.latest):
            assert "\n" not in line, f"a refusal of several lines: {line!r}"
            assert len(line) < 1000, f"a refusal of {len(line)} letters"
        state.refusals.latest.clear()
        return state.refusals.total == before


@target
def control_messages(folder: Path, stack: ExitStack) -> Target:
    """Envelopes with any content, signed by a member: the fields around the body."""
    from edge_run.devices.members.member_list import NO_VERSION
    from edge_run.devices.messages.topics import Topic

    mesh = _Mesh()
    fields = {"incarnation": "0" * 20, "count": 10**9, "epoch": 1, "time_ms": 10**12, "list": list(NO_VERSION)}
    fields["body"] = {"state": "here"}

    def topic() -> Topic:
        return Topic(mesh.cluster.id, "status", mesh.identity.node)

    def feed(data: bytes) -> bool:
        """Count and time, where they are those of the seeds, become those of now: else all were old after the first."""
        mesh.number += 1
        fresh = {b'"count":%d' % 10**9: b'"count":%d' % mesh.number, b"%d" % 10**12: b"%d" % (mesh.now_s * 1e3)}
        for old, new in fresh.items():
            data = data.replace(old, new)
        return mesh.take_in(str(topic()), mesh.seal(topic(), lambda _: data))

    documents = [fields, {**fields, "body": {"state": "left"}}, {**fields, "body": {"state": "will"}, "count": 0}]
    return Target("control messages", feed, (), [dump(fields)], 16 * MIB, documents, largest_bytes=250 * KIB)


@target
def envelopes(folder: Path, stack: ExitStack) -> Target:
    """Envelopes as bytes: signatures, proofs and keys that do not fit what they are around."""
    from edge_run.devices.messages.topics import Topic

    mesh = _Mesh()
    topic = Topic(mesh.cluster.id, "load", mesh.identities[0].node)
    seeds = [mesh.writers[0].seal(topic, 1, {"load": {"cpu": 0.5}})[0]]

    def feed(data: bytes) -> bool:
        return mesh.take_in(str(topic), data)

    return Target("envelopes", feed, (), seeds, 4 * MIB)


@target
def bodies(folder: Path, stack: ExitStack) -> Target:
    """Bodies of every kind in valid envelopes, taken in by a member end to end; the first byte says which kind."""
    import zmq

    from edge_run.devices.messages.topics import Topic

    mesh = _Mesh()
    kinds = ("status", "caps", "load", "cmd", "rsp", "lease", "plan")
    link = {"key": zmq.curve_keypair()[0].decode(), "places": ["tcp://192.168.0.2:5000"]}
    heard = [mesh.state.identity.incarnation]
    answers = {"to": mesh.state.identity.node, "incarnation": mesh.state.identity.incarnation, "number": 1}
    valid: dict[str, list[Any]] = {
        "status": [
            {"state": "here", "session": 1, "asks": True},
            {"state": "will"},
            {"state": "left"},
            {"state": "watching"},
        ],
        "caps": [{"name": "there", "capabilities": {"memory_bytes": 1, "models": ["x"]}, "link": link, "heard": heard}],
        "load": [{"load": {"cpu": 0.5}}],
        "cmd": [{"number": 1, "incarnation": mesh.state.identity.incarnation, "order": {"kind": "run"}}],
        "rsp": [
            {**answers, "answer": {"x": 1}},
            {**answers, "error": "why", "code": 4, "figures": {"minimum_bytes": 1}},
            {**answers, "error": "why", "code": 3, "special": "missing"},
        ],
        "lease": [{"state": "claim"}, {"state": "hold"}, {"state": "free"}],
        "plan": [{"plan": {"model": "x"}}],
    }
    mesh.state.outbound.add(mesh.identities[0].node, mesh.identities[0].incarnation, 1, {})

    def feed(data: bytes) -> bool:
        mesh.number += 1
        kind = kinds[data[0] % len(kinds)] if data else "status"
        node = mesh.state.identity.node if kind == "cmd" else mesh.identity.node
        topic = Topic(mesh.cluster.id, kind, None if kind in ("lease", "plan") else node, 1 if kind == "plan" else 0)
        payload = mesh.seal(topic, lambda text: text.replace(b'"body":{}', b'"body":' + data[1:]))
        return mesh.take_in(str(topic), payload, mesh.identity.node if mesh.number % 3 == 0 else None)

    def special(chance: random.Random) -> bytes:
        kind = chance.randrange(len(kinds))
        if chance.random() < LARGE_SHARE:
            return bytes([kind]) + b'{"capabilities":{"x":' + large_text(200 * KIB, chance) + b"}}"
        return bytes([kind]) + broken_document(valid[kinds[kind]], chance)

    seeds = [
        bytes([kinds.index(kind)]) + dump(body) for kind in kinds for body in valid[kind] if body != {"state": "will"}
    ]
    return Target("bodies", feed, (), seeds, 16 * MIB, special=special)


@target
def topics(folder: Path, stack: ExitStack) -> Target:
    """Names of topics, under which a valid message comes."""
    from edge_run.devices.messages.topics import Topic

    mesh = _Mesh()

    def feed(data: bytes) -> bool:
        topic = Topic(mesh.cluster.id, "status", mesh.identities[0].node)
        mesh.number = 0
        payload = mesh.writers[0].seal(topic, 1, {"state": "here"})[0]
        return mesh.take_in(
            data.decode("utf-8", "surrogatepass" if len(data) % 2 else "replace") if data else "", payload
        )

    def safe(data: bytes) -> bool:
        try:
            return feed(data)
        except UnicodeDecodeError:  # not what MQTT hands on
            return False

    seeds = [str(Topic(mesh.cluster.id, "status", mesh.identities[0].node)).encode()]
    return Target("topics", safe, (), seeds, 4 * MIB)


@target
def link_frames(folder: Path, stack: ExitStack) -> Target:
    """Heads of messages on the data link."""
    from edge_run.base.errors import ProtocolError
    from edge_run.devices.link import frames

    documents = [
        {"kind": "want", "what": "piece", "model": "m" * 64, "number": 3},
        {"epoch": 2**40, "widths": [1, 2]},
        {},
    ]
    heads = [frames.Head(kind, 7, 1, document) for kind in frames.FrameKind for document in documents]
    seeds = [frames.message_of(head, [b"part"] * number)[0] for number, head in enumerate(heads)]
    fixed = seeds[0][: -len(dump(documents[0]))]

    def feed(data: bytes) -> bool:
        head = frames.unpack(memoryview(data))
        frames.pack(head)  # an answer repeats what was asked
        if sum(head.sizes) < 1 << 20:
            cut = frames.message_of(head, [bytes(size) for size in head.sizes])
            assert sum(part.nbytes for part in frames.parts_of(head, list(map(memoryview, cut[1:])))) == sum(head.sizes)
        return True

    return Target("link frames", feed, (ProtocolError,), seeds, 4 * MIB, documents, lambda text: fixed + text, 63 * KIB)


@target
def cluster_files(folder: Path, stack: ExitStack) -> Target:
    from edge_run.base.errors import MeshError
    from edge_run.devices.members import cluster as clusters
    from edge_run.devices.members.keys import DeviceKey

    made = clusters.found_cluster(
        DeviceKey(bytes(32)), "one", "mqtts://user:word@host:8883", "0.0.0.0:1883", "/some/file.pem"
    )
    clusters.write_cluster(folder, made)
    path = folder / "cluster.json"
    seed = path.read_bytes()
    feed = in_file(path, lambda: clusters.read_cluster(folder))
    return Target("cluster files", feed, (MeshError,), [seed], 4 * MIB, [json.loads(seed)], largest_bytes=64 * KIB)


@target
def join_lines(folder: Path, stack: ExitStack) -> Target:
    """What a person pastes. A line is checked by a CRC, which whoever breaks it on purpose makes right again."""
    import base64
    import zlib

    from edge_run.base.errors import ConfigError
    from edge_run.devices.members import cluster as clusters

    urls = ("mqtt:", "mqtt://host", "mqtts://u:p@[::1]:8883")
    lines = [
        clusters.invitation_line(clusters.Invited("abcdefgh", b"f" * 32, url, key, b"s" * 32))
        for url in urls
        for key in (b"", b"b" * 32)
    ]

    def opened_line(line: str) -> bytes:
        word = line[len(clusters._PREFIX) :]
        return base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))[4:]

    def wrap(text: bytes) -> bytes:
        checked = zlib.crc32(text).to_bytes(4, "big") + text
        return (clusters._PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")).encode()

    def feed(data: bytes) -> bool:
        said = clusters.parse_join_line(data.decode("utf-8", "replace"))
        if said.broker != clusters.FIND_BROKER:
            clusters.parse_broker(said.broker)
        return True

    documents = [json.loads(opened_line(line)) for line in lines]
    seeds = [line.encode() for line in lines]
    return Target("join lines", feed, (ConfigError,), seeds, 4 * MIB, documents, wrap, 64 * KIB)
