"""What device and server of a split say to each other, and the files that they have."""

from __future__ import annotations

import dataclasses
import json
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from edge_run.base.units import MIB
from hostile import broken_bytes, broken_document
from hostile_target import Target, in_file, target


def _codec() -> Any:
    import numpy as np

    from edge_run.partition.latent_codec import fit_codec

    generator = np.random.default_rng(0)
    samples = generator.laplace(size=(50, 6, 20)) * np.exp(generator.normal(size=(1, 6, 1)))
    return fit_codec(samples.astype(np.float32), "model", "cut")


def _codes(name: str, coder: int) -> Target:
    import numpy as np

    from edge_run.base.errors import ProtocolError

    codec = dataclasses.replace(_codec(), coder=coder)
    tensors = [np.random.default_rng(n).normal(size=(6, 20)).astype(np.float32) * (9**n) for n in range(3)]
    seeds = [codec.encode(tensor, rate) for tensor in tensors for rate in range(3)]
    head = seeds[0][:6]

    def feed(data: bytes) -> bool:
        tensor, _ = codec.decode(data, 20)
        assert tensor.shape == (6, 20)
        assert np.isfinite(tensor).all()
        return True

    def special(chance: random.Random) -> bytes:
        payload = broken_bytes(chance.choice(seeds)[7:], seeds, chance)
        rate = bytes([head[0] & 0xF0 | chance.randrange(3)])
        length = bytes([len(payload)]) if len(payload) < 255 else b"\xff" + (len(payload) % 65536).to_bytes(2, "little")
        return rate + head[1:6] + length + payload

    return Target(name, feed, (ProtocolError,), seeds, 4 * MIB, special=special)


@target
def latent_codes(folder: Path, stack: ExitStack) -> Target:
    """Codes of the range coder."""
    return _codes("latent codes", 0)


@target
def latent_codes_of_zstd(folder: Path, stack: ExitStack) -> Target:
    return _codes("latent codes of zstd", 1)


@target
def coded_activations(folder: Path, stack: ExitStack) -> Target:
    """Activations between devices of a mesh, packed and compact; the first byte says which."""

    import numpy as np

    from edge_run.base.errors import ProtocolError
    from edge_run.base.extras import MESH, need
    from edge_run.partition.activation_codec import decode_activations, encode_activations, pack_floats, unpack_floats

    activation = np.random.default_rng(0).normal(size=(4, 100)).astype(np.float32)
    activation[1, 3] = 900
    seeds = [b"\0" + pack_floats(memoryview(activation.tobytes()).cast("f")), b"\1" + encode_activations(activation)]
    zstandard = need("zstandard", MESH)

    def feed(data: bytes) -> bool:
        if not data:
            return False
        code = memoryview(data)[1:]
        return (decode_activations(code).size if data[0] & 1 else len(unpack_floats(code))) > 0

    def special(chance: random.Random) -> bytes:
        """Valid zstd of broken content, with sizes that fit it or not."""
        if chance.random() < 0.5:
            content = chance.randbytes(chance.choice((400, 0, 1, 399)))
            packed = zstandard.ZstdCompressor(level=1).compress(content)
            size = chance.choice((400, len(content), 2**24, 2**24 + 1, 2**32 - 1))
            return b"\0" + struct.pack("<II", size, len(packed)) + packed + bytes(3 * min(size, 500))
        rows, columns, outliers = (chance.choice((0, 1, 4, 100, 2**24, 2**32 - 1)) for _ in range(3))
        blocks = -(-rows * columns // 64)
        content = chance.randbytes(min(66 * blocks + 6 * outliers, 50_000))
        packed = zstandard.ZstdCompressor(level=1).compress(content)
        return b"\1ERS1" + struct.pack("<III", rows, columns, outliers) + packed

    # A part of a message has at most 64 MiB, and so have the numbers that come out of one.
    return Target("coded activations", feed, (ProtocolError,), seeds, 16 * MIB, special=special)


@target
def bundles(folder: Path, stack: ExitStack) -> Target:
    """`code.json` of a split."""

    from edge_run.base.errors import ModelFileError
    from edge_run.runtime.split import bundle as split_bundle

    codec = _codec()
    rates = tuple(split_bundle.StoredRate(100, rate, 10, 1000, 120, 10, 5, 5) for rate in codec.rates)
    threshold = split_bundle.StoredFilter(0.5, 1, 2, 3, 4)
    files = ("a" * 64, "b" * 64, "c" * 64)
    shapes = ((3, 16, 16), (6, 4, 5))
    code = split_bundle.StoredCode(split_bundle.FORMAT, *files, "cut", *shapes, ("logits",), rates, (threshold,))
    (folder / split_bundle.CODE_FILE).write_bytes(split_bundle.code_json(code))
    path = folder / split_bundle.CODE_FILE
    seed = path.read_bytes()

    def read() -> bool:
        found = split_bundle.read_bundle(folder)
        assert found.positions > 0
        assert found.size
        return True

    return Target(
        "bundles", in_file(path, read), (ModelFileError,), [seed], 32 * MIB, [json.loads(seed)], largest_bytes=MIB
    )


@target
def split_answers(folder: Path, stack: ExitStack) -> Target:
    """What a server, or whatever listens there, says to a device: its hello, then a reply with arrays."""

    import numpy as np

    from edge_run.base.errors import ProtocolError
    from edge_run.partition.split_choice import FrameCost
    from edge_run.runtime.split import protocol

    costs = {"code": FrameCost(0.001, 30), "image": FrameCost(0.002, 30)}
    arrays = protocol.pack_arrays([np.arange(10, dtype=np.float32).reshape(2, 5), np.array(3, np.int64)])

    def reply(body: bytes, length: int | None = None) -> bytes:
        return protocol.REPLY.pack(0, 1, 0.1, 0.2, len(body) if length is None else length) + body

    hello = protocol.make_hello({"0102030405": costs})
    value = json.loads(hello[4:])

    def feed(data: bytes) -> bool:
        near, far = socket.socketpair()
        try:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            far.settimeout(0)
            far.send(data)
            far.shutdown(socket.SHUT_WR)
            with mock.patch.object(socket, "create_connection", return_value=near), _no_delay():
                link = protocol.ServerLink(("server", 1), 2.0)
            answer = link.ask(protocol.ASK_PROBE, b"", 2.0)
            protocol.unpack_arrays(answer.body)
            assert answer.queue_s + answer.server_s + answer.network_s < 1e7
            return True
        finally:
            near.close()
            far.close()

    def special(chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            text = broken_document([value], chance)
            return struct.pack("<I", len(text)) + text + reply(arrays)
        body = broken_bytes(arrays, [arrays], chance)
        if chance.random() < 0.5:
            rank = chance.choice((0, 1, 3, 16, 32, 33, 64, 255))
            shape = [chance.choice((0, 1, 2, 5, 65535, 2**31, 2**32 - 1)) for _ in range(rank)]
            body = bytes([1, chance.randrange(11), rank]) + struct.pack(f"<{rank}I", *shape) + bytes(40)
        return hello + reply(body, chance.choice((None, None, None, 2**26, 2**26 + 1, 2**32 - 1)))

    refusals = (ProtocolError, protocol.LinkLost)
    return Target("split answers", feed, refusals, [hello + reply(arrays)], 4 * MIB, special=special)


@contextmanager
def _no_delay() -> Iterator[None]:
    """A pair of sockets is not of TCP."""
    with (
        mock.patch.object(socket, "TCP_NODELAY", socket.SO_KEEPALIVE),
        mock.patch.object(socket, "IPPROTO_TCP", socket.SOL_SOCKET),
    ):
        yield


@target
def split_requests(folder: Path, stack: ExitStack) -> Target:
    """What a device, or whoever connects, says to `split serve`: real sockets, real networks, which are small."""
    from io import BytesIO

    import anyio
    import numpy as np
    from PIL import Image

    from edge_run.runtime.split import protocol
    from edge_run.runtime.split.bundle import read_bundle
    from edge_run.runtime.split.server import SplitServer
    from vision_models import make_bundle, make_pixels

    head = make_bundle(folder)
    bundle = read_bundle(head)
    server, ports = SplitServer([folder / "tail.onnx"], 1), [0]
    is_ready, scopes = threading.Event(), []

    async def serve() -> None:
        with anyio.CancelScope() as scope:
            scopes.append((anyio.from_thread, scope))
            await server.serve("127.0.0.1", 0, lambda port: (ports.__setitem__(0, port), is_ready.set()))  # type: ignore[func-returns-value]

    loops: list[Any] = []

    def run() -> None:
        async def main() -> None:
            import asyncio

            loops.append(asyncio.get_running_loop())
            await serve()

        anyio.run(main)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_ready.wait(60)

    def stop() -> None:
        loops[0].call_soon_threadsafe(scopes[0][1].cancel)
        thread.join(20)

    stack.callback(stop)
    shape = bundle.code.latent
    latents = np.random.default_rng(0).normal(size=(shape[0], bundle.positions)).astype(np.float32)
    file = BytesIO()
    Image.fromarray(make_pixels(1)[0].transpose(1, 2, 0)).save(file, "PNG")
    bodies_of = {
        protocol.ASK_CODE: bundle.codec.encode(latents, 0),
        protocol.ASK_IMAGE: bundle.codec.fingerprint + file.getvalue(),
        protocol.ASK_PROBE: b"",
    }

    def request(kind: int, body: bytes, length: int | None = None) -> bytes:
        return protocol.REQUEST.pack(kind, 1, 20.0, len(body) if length is None else length % 2**32) + body

    def feed(data: bytes) -> bool:
        """Whether all that came back are answers; the server must be there for the next."""
        with socket.create_connection(("127.0.0.1", ports[0]), 20) as device:
            device.settimeout(20)
            device.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            answer = bytearray()
            try:
                device.sendall(data)
                device.shutdown(socket.SHUT_WR)
                while piece := device.recv(1 << 16):
                    answer += piece
            except ConnectionError:  # it hangs up on what cannot be, with bytes of ours unread
                return False
        place = 4 + int.from_bytes(answer[:4], "little")
        assert len(answer) >= place, "the server's hello is cut off"
        count = 0
        while place < len(answer):
            status, _, _, _, length = protocol.REPLY.unpack_from(answer, place)
            if status != protocol.DONE:
                return False
            place, count = place + protocol.REPLY.size + length, count + 1
        return count > 0

    def special(chance: random.Random) -> bytes:
        kind = chance.choice((protocol.ASK_CODE, protocol.ASK_CODE, protocol.ASK_IMAGE))
        body = broken_bytes(bodies_of[kind], list(bodies_of.values()), chance)
        if chance.random() < 0.7:
            start = 1 if kind == protocol.ASK_CODE else 0
            good = bundle.codec.fingerprint
            body = body[:start] + good + body[start + len(good) :]
        return request(kind, body) + request(protocol.ASK_PROBE, b"")

    seeds = [request(kind, body) for kind, body in bodies_of.items()]
    return Target("split requests", feed, (), [*seeds, b"".join(seeds)], 64 * MIB, special=special)
