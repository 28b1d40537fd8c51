"""What members say to each other in a run: commands through to llama.cpp, activations, headers, orders, answers."""

from __future__ import annotations

import json
import random
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from commands import OPTIONS
from edge_run.base.errors import Cancelled, EdgeRunError, ProtocolError
from edge_run.base.fields import Fields
from edge_run.base.mesh import Message
from edge_run.base.units import KIB, MIB
from edge_run.devices.link.frames import MOST_HEADER_BYTES
from edge_run.partition.activation_codec import encode_activations, pack_floats
from hostile import BORDERS, broken_bytes, dump
from hostile_target import Target, target

_HEAD = struct.Struct("<IH")  # bytes of the header's text, and of each part after it
SIZES = (4096, 256)  # of an activation's parts


def _packed(header: Any, *parts: bytes) -> bytes:
    """Return a message as an input: its header's text, then its parts, all as long as the first."""
    text = dump(header)
    return _HEAD.pack(len(text), len(parts[0]) if parts else 0) + text + b"".join(parts)


def _message(data: bytes, node: str = "b") -> Message | None:
    """Return the message in an input; None where the link would not let it through."""
    if len(data) < _HEAD.size:
        return None
    n_text, n_part = _HEAD.unpack_from(data)
    text, rest = data[_HEAD.size :][:n_text], data[_HEAD.size :][n_text:]
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or len(text) > MOST_HEADER_BYTES:
        return None
    step = max(1, n_part, len(rest) // 60)
    return Message(node, header, tuple(memoryview(rest[i : i + step]) for i in range(0, max(1, len(rest)), step)))


def _ints(numbers: Sequence[int]) -> bytes:
    return np.array([number & 0xFFFFFFFF for number in numbers], np.uint32).tobytes()


@target
def commands_of_a_run(folder: Path, stack: ExitStack) -> Target:
    """Commands, carried out by a slice with canaries after what llama.cpp's batch has room for."""
    from edge_run.base.config import ModelConfig
    from edge_run.runtime.mesh.commands import carry_out
    from edge_run.runtime.mesh.messages import read_command
    from edge_run.runtime.slices.engine import SliceEngine
    from edge_run.runtime.slices.slice import Share
    from guarded import GuardedBatch
    from slices import QueueTransport
    from tiny_models import make_model

    config = ModelConfig(memory="2GiB", cache_folder=folder / "cache", chunk_bytes=16 * KIB, **OPTIONS)
    engine = SliceEngine.open(make_model("llama", folder), config)
    stack.callback(engine.close)
    engine.assign(Share(("w",) * len(engine.layout.units), "w"), QueueTransport({}, "w"))
    guard = GuardedBatch(engine.decoder)
    stack.callback(guard.close)

    def feed(data: bytes) -> bool:
        message = _message(data)
        if message is None:
            return False
        try:
            carry_out(engine, read_command(message, engine.decoder.limits))
        finally:
            guard.check()
        return True

    def sent(what: str, numbers: Sequence[int]) -> bytes:
        return _packed({"kind": "command", "epoch": 1, "number": 1, "what": what}, _ints(numbers))

    def special(chance: random.Random) -> bytes:
        return sent(*_command(chance))

    seeds = [
        sent("clear", []),
        sent("decode", [1, 0, 0, 0, 0, 2, 1, 0, 1, 0]),
        sent("branch", [0, 1, 2]),
        sent("decode", [3, 2, 0, 1, 2, 1, 2]),
        sent("keep", [0, 2, 1, 1, 2]),
        sent("rewind", [0, 1]),
        sent("learn", [3, 1]),
        sent("clear", []),
    ]
    return Target("commands of a run", feed, (EdgeRunError,), seeds, 48 * MIB, special=special)


def _command(chance: random.Random) -> tuple[str, list[int]]:
    """Return a command that is right but for a few numbers, which are near to right, at borders, or anything."""
    what = chance.choice(("decode", "decode", "decode", "rewind", "branch", "keep", "clear", "learn"))
    if what == "decode":
        numbers, position = [], chance.choice((0, 0, 1, 2, 5, 240))
        for i in range(chance.choice((1, 1, 2, 5, 12, 40))):
            branches: Sequence[int] = chance.choice(([1], [1, 2])) if chance.random() < 0.1 else ()
            if chance.random() < 0.02:
                branches = chance.choice(([0] * chance.randrange(90), range(chance.randrange(9))))
            numbers += [chance.randrange(384), position + i, 0 if branches else chance.choice((0, 0, 0, 1)), i % 5 == 0]
            numbers += [len(branches), *branches]
    else:
        numbers = [chance.choice((0, 0, 1, 2, 3, 8)) for _ in range(chance.choice((0, 2, 2, 3, 4, 5)))]
    for _ in range(chance.choice((0, 0, 0, 1, 2)) if numbers else 0):
        numbers[chance.randrange(len(numbers))] = chance.choice((*BORDERS, -1, 4000, chance.getrandbits(32)))
    return what, numbers


@target
def states_of_a_run(folder: Path, stack: ExitStack) -> Target:
    """Activations, plain, packed and compact, of which it is known how large they should be."""
    from edge_run.runtime.mesh.activation_coding import decode

    numbers = np.random.default_rng(3).standard_normal(SIZES[0] // 4).astype(np.float32)
    places = bytes(SIZES[1])
    coded = {
        "plain": numbers.tobytes(),
        "packed": pack_floats(memoryview(numbers).cast("B")),
        "compact": encode_activations(numbers.reshape(1, -1)),
    }
    bombs = [encode_activations(np.zeros((rows, 4096), np.float32)) for rows in (1, 64, 4096)]
    seeds = [_coded([kind, "plain"], [code, places]) for kind, code in coded.items()]

    def feed(data: bytes) -> bool:
        (n_text,) = struct.unpack_from("<H", data) if len(data) > 2 else (0,)
        try:
            said = json.loads(data[2:][:n_text])
            kinds, lengths = said["codes"], [int(length) for length in said["lengths"]]
        except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
            return False
        rest, parts = data[2 + n_text :], []
        for length in lengths[:64]:
            parts.append(memoryview(rest[: max(0, length)]))
            rest = rest[max(0, length) :]
        made = decode(kinds, parts, SIZES)
        assert [part.nbytes for part in made] == list(SIZES)
        return True

    def special(chance: random.Random) -> bytes:
        kind = chance.choice(list(coded))
        code = chance.choice((coded[kind], *bombs))
        broken = broken_bytes(code, list(coded.values()), chance) if chance.random() < 0.8 else code
        return _coded([chance.choice((kind, *coded)), "plain"], [broken, places])

    return Target("activations of a run", feed, (ProtocolError,), seeds, 1 * MIB, special=special)


def _coded(kinds: list[str], parts: list[bytes]) -> bytes:
    text = dump({"codes": kinds, "lengths": [len(part) for part in parts]})
    return struct.pack("<H", len(text)) + text + b"".join(parts)


class _Queue:
    """A link on which messages come that a test puts there."""

    def __init__(self) -> None:
        self.items: deque[Message] = deque()

    def receive(self, **_: object) -> Message | None:
        return self.items.popleft() if self.items else None


@target
def headers_of_a_run(folder: Path, stack: ExitStack) -> Target:
    """What comes while an activation is waited for, by the coordinator and by a worker."""
    from edge_run.base.errors import DeviceLost
    from edge_run.runtime.mesh.activation_coding import ActivationCoder
    from edge_run.runtime.mesh.transport import LinkTransport, PassFailed
    from edge_run.runtime.slices.slice import Share

    link = _Queue()

    def stop() -> None:
        if not link.items:
            raise Cancelled("nothing more comes")

    def feed(data: bytes) -> bool:
        message = _message(data)
        if message is None:
            return False
        node = "c" if message.header.get("unit") == 2 else "a"
        owners = ("a", "b", "c", "a")
        coder = ActivationCoder("exact", {})
        transport = LinkTransport(link, 65536, Share(owners, node), coder, stop, MIB)  # type: ignore[arg-type]
        transport.expect(7)
        transport._round = 1
        sender, unit = ("b", 2) if transport.node == "c" else ("c", 3)  # whose activation is waited for
        message = replace(message, node=sender)
        link.items.clear()
        link.items.extend([message] * (300 if len(data) % 9 == 0 else 1))
        blamed: object = sender
        try:
            transport.receive(unit, (64,))
        except (DeviceLost, PassFailed) as error:  # what an honest device says as well
            blamed = error.node
        except ProtocolError as error:
            blamed = error.node
            raise
        finally:
            assert blamed in ("b", "c"), "who is to blame is known, and is not the coordinator"
        assert all(0 <= seconds < 1e7 for seconds in transport.spent.values())
        return True

    handed = {
        "kind": "activation",
        "epoch": 65536,
        "number": 7,
        "round": 1,
        "unit": 3,
        "spent": {"b": 0.5},
        "codes": None,
    }
    failed = {
        "kind": "failed",
        "epoch": 65536,
        "number": 7,
        "code": 6,
        "error": "x",
        "figures": {},
        "special": "logits",
        "lost": "",
        "blames": "b",
    }
    documents = [
        handed,
        {**handed, "number": 8},
        {**handed, "unit": 2},
        {**handed, "kind": "command", "oldest": 9},
        failed,
        {**failed, "lost": "b"},
        {**handed, "kind": "stop"},
    ]
    return Target(
        "headers of a run",
        feed,
        (ProtocolError, Cancelled),
        [_packed(handed, bytes(64)), _packed(failed)],
        6 * MIB,
        documents,
        lambda text: _HEAD.pack(len(text), 64) + text + bytes(64),
        largest_bytes=60 * KIB,
    )


@target
def orders_of_a_run(folder: Path, stack: ExitStack) -> Target:
    """Orders of a coordinator, carried out by a worker that has the model."""
    from edge_run.base.config import ModelConfig
    from edge_run.devices.host.memory import process_memory
    from edge_run.runtime.fetch.fingerprint import fingerprint
    from edge_run.runtime.mesh import links
    from edge_run.runtime.mesh.offers import layout_hash, shared_settings
    from edge_run.runtime.slices.engine import SliceEngine
    from edge_run.runtime.worker.worker import Worker
    from edge_run.tiers.gguf import read_gguf
    from fake_mesh import Hub
    from tiny_models import make_model

    links.MEASURE_TIMEOUT_S = 0.01
    path = make_model("llama", folder)
    memory = process_memory().resident_bytes + 256 * MIB
    config = ModelConfig(
        memory=memory, threads=1, check_file=False, cache_folder=folder / "cache", chunk_bytes=16 * KIB
    )
    hub = Hub()
    hub.join("a")
    worker = Worker(hub.join("w"), [path], config)
    worker.start()
    stack.callback(worker.close)
    config = ModelConfig(memory=memory, cache_folder=folder / "cache", chunk_bytes=16 * KIB, **OPTIONS)
    seen = SliceEngine.open(path, config)
    settings, n_units = shared_settings(seen, takes_any_numerics=False), len(seen.layout.units)
    layout = layout_hash(seen.layout)
    seen.close()
    shards = [[shard.size_bytes, shard.data_offset] for shard in read_gguf(path).shards]
    model = fingerprint([path], folder / "cache").model
    prepare = {"order": "prepare", "model": model, "name": path.name, "shards": shards, "settings": settings}
    share = {"epoch": 65536, "owners": ["a", *["w"] * (n_units - 2), "a"], "layout": layout}
    assign = {**share, "order": "assign", "bytes_per_s": {"a": 1e6}}
    fetch = {**share, "order": "fetch", "providers": ["a"]}
    documents = [prepare, {"order": "status"}, {"order": "measure", "nodes": ["a"], "fresh_s": 1.0}, assign, fetch]
    seeds = [dump(document) for document in (*documents, {"order": "close"})]
    state = {"epoch": 1}

    def feed(data: bytes) -> bool:
        try:
            order = json.loads(data)
        except (ValueError, RecursionError):
            return False
        if not isinstance(order, dict) or _takes_long(order):
            return False
        state["epoch"] += 1
        if type(order.get("epoch")) is int and order["epoch"] == 65536:
            order["epoch"] = state["epoch"] << 16  # else all but the first would be old
        if worker._engine is None and order.get("order") in ("assign", "fetch"):
            worker.handle("a", state["epoch"], prepare)
        answer = worker.handle("a", state["epoch"], order)
        json.dumps(answer, allow_nan=False)
        return True

    return Target("orders of a run", feed, (EdgeRunError,), seeds, 256 * MIB, documents, largest_bytes=200 * KIB)


def _takes_long(order: dict[str, Any]) -> bool:
    """Return whether a setting is right, and takes threads or memory that a process in a small box does not get."""
    settings = order.get("settings")
    wide = settings if isinstance(settings, dict) else {}
    return any(isinstance(wide.get(name), int) and 4096 >= wide[name] > 8 for name in ("threads", "sequences"))


@target
def answers_of_a_run(folder: Path, stack: ExitStack) -> Target:
    """Answers to orders, as a plan is made of them."""
    from edge_run.devices.mesh.orders import OutboundOrders
    from edge_run.partition.mesh_plan import UnitWork
    from edge_run.partition.mesh_ring import plan_ring
    from edge_run.runtime.mesh.fetch import MeshFetch, _progress_of, _refusal
    from edge_run.runtime.mesh.links import MeasuredLinks, read_measured
    from edge_run.runtime.mesh.offers import device_spec, differing
    from fake_mesh import Hub

    works = [UnitWork(1 << 20, 1 << 10, 1 << 20)] * 6
    sizes = ("room_bytes", "window_bytes", "pair_bytes", "range_bytes", "least_kept_bytes")
    room = {**dict.fromkeys(sizes, 64 << 20), "compute_bytes_per_s": 1e9, "disk_bytes_per_s": 1e9}
    room |= {"least_kept_share": 0.1, "layout": "x", "numerics": {"threads": 1}}
    lack = {**room, "missing_bytes": [1 << 20] * 6, "most_weight_bytes": 1 << 30}
    links_found = {"links": {"b": [0.001, 1e6], "a": [0.1, 1e7]}, "unreached": {"c": "nothing listens there"}}
    fetching = {
        "wanted_bytes": 100,
        "done_bytes": 10,
        "is_over": False,
        "why": "",
        "wrong": ["c"],
        "failures": {"c": "no"},
    }
    documents = [
        {"number": 1, "answer": room},
        {"number": 1, "answer": lack},
        {"number": 1, "answer": links_found},
        {"number": 1, "answer": {"place": "computing from unit 3", "fetch": fetching}},
        {"number": 1, "error": "no"},
    ]
    mesh = Hub().join("a")

    def feed(data: bytes) -> bool:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return False
        if not isinstance(body, dict):
            return False
        outbound = OutboundOrders()
        _, pending = outbound.add("b", "incarnation", 1, {})
        outbound.take_answer("b", body)
        answer = pending.answer
        if answer is None:
            assert len(str(pending.error)) < 1000
            return pending.error is not None
        if "fetch" in answer:
            progress = _progress_of("b", answer)
            told.run_told(progress)
            _refusal({"b": progress}, ["b", "c"], str)
            Fields(answer, "b", "b").words("place")
            return True
        links = MeasuredLinks(mesh, lambda orders, timeout_s: ({}, {}), 4096)
        links.measure(["a", "b", "c"])
        links._tried |= {("b", "a"), ("b", "c")}
        links._keep("b", read_measured(answer))
        if "room_bytes" not in answer:
            links.why_apart("b")
            return True
        told.note("b", answer)
        specs = [device_spec("a", room), device_spec("b", answer)]
        differing(room, answer.get("numerics"))
        plan = plan_ring(works, specs, links.hop)
        if plan is not None:
            told.seconds(plan, "b", links.rate("a", "b"))
        return True

    class Told(MeshFetch):
        def run_told(self, progress: Any) -> None:
            self._tell(["b"], {"b": progress})

    told = Told(mesh, 6, lambda text: None, lambda: None)
    seeds = [dump(document) for document in documents]
    return Target("answers of a run", feed, (ProtocolError,), seeds, 8 * MIB, documents, largest_bytes=200 * KIB)
