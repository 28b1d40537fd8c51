"""`edge-run split serve`: the tails of bundles behind a TCP port."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.streams.buffered
import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ConfigError, EdgeRunError, NotSupported, ProtocolError
from edge_run.runtime.image_folder import decode_image
from edge_run.runtime.onnx_session import median_s, open_session, run_session
from edge_run.runtime.split_bundle import MODEL, TAIL, read_bundle
from edge_run.runtime.split_link import (
    CODE,
    DONE,
    FINGERPRINT_BYTES,
    IMAGE,
    MOST_BODY_BYTES,
    PROBE,
    REFUSED,
    REPLY,
    REQUEST,
    make_hello,
    pack_arrays,
)

IDLE_S, BODY_S, SEND_S = 3600.0, 30.0, 30.0
MOST_CONNECTIONS = 64
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a device without power is gone in a minute
_log = logging.getLogger(__name__)


class Tail:
    """The networks of one bundle, opened. Thread-safe."""

    def __init__(self, path: Path, threads: int | None) -> None:
        """Open the tail and the uncut network. Raises ModelFileError."""
        self._bundle = read_bundle(path)
        folder = self._bundle.folder
        self._tail = open_session(self._bundle.checked(TAIL), str(folder / TAIL), threads)
        self._model = open_session(self._bundle.checked(MODEL), str(folder / MODEL), threads)
        self.fingerprint = self._bundle.codec.fingerprint

    def describe(self) -> dict[str, Any]:
        """Return what the hello says of it: the fingerprint, and measured seconds."""
        latent = np.zeros((1, *self._bundle.code.latent), dtype=np.float32)
        pixels = np.zeros((1, *self._bundle.code.input), dtype=np.uint8)
        return {
            "fingerprint": self.fingerprint.hex(),
            "code_s": median_s(lambda: run_session(self._tail, latent)),
            "image_s": median_s(lambda: run_session(self._model, pixels)),
        }

    def answer(self, kind: int, body: bytes) -> list[NDArray[Any]]:
        """Return the network's answers to a code or an image. Raises ProtocolError for one that is damaged."""
        if kind == IMAGE:
            return run_session(self._model, decode_image(body[FINGERPRINT_BYTES:], self._bundle.size)[None])
        tensor, _ = self._bundle.codec.decode(body, self._bundle.positions)
        return run_session(self._tail, tensor.reshape(1, *self._bundle.code.latent))


class SplitServer:
    """Answers the frames of devices: codes with the tail that they name, images with the uncut network."""

    def __init__(self, tails: Sequence[Path], threads: int | None = None) -> None:
        """Open the bundles. Raises ConfigError for none, or two of one fingerprint; ModelFileError."""
        if not tails:
            raise ConfigError("split serve: needs at least one tail.onnx")
        opened = [Tail(path, threads) for path in tails]
        self._tails = {tail.fingerprint: tail for tail in opened}
        if len(self._tails) != len(opened):
            raise ConfigError("split serve: two of the tails are the same; name each once")
        self._hello = make_hello([tail.describe() for tail in opened])

    async def serve(self, host: str, port: int, ready: Callable[[int], None]) -> None:
        """Serve until cancelled. ready: told the port, once it is open. Raises NotSupported where it cannot be."""
        try:
            listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except OSError as error:
            raise NotSupported(
                f"{host}:{port}: cannot be listened at ({error.strerror or error}); choose another --host or --port"
            ) from error
        self._turn = anyio.CapacityLimiter(1)  # two passes at once would only slow each other down
        self._places = anyio.Semaphore(MOST_CONNECTIONS)
        async with listener:
            ready(listener.extra(anyio.abc.SocketAttribute.local_port))
            await listener.serve(self._welcome)

    async def _welcome(self, stream: anyio.abc.SocketStream) -> None:
        async with stream, self._places:
            _keep_alive(stream.extra(anyio.abc.SocketAttribute.raw_socket))
            try:
                await self._talk(stream)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, TimeoutError, OSError):
                _log.debug("a device has gone")
            except ProtocolError as error:
                _log.warning("a device was refused: %s", error)

    async def _talk(self, stream: anyio.abc.SocketStream) -> None:
        """Answer the requests of one device, until it goes or says what cannot be."""
        reader = anyio.streams.buffered.BufferedByteReceiveStream(stream)
        await _send(stream, self._hello)
        while True:
            with anyio.fail_after(IDLE_S):
                kind, number, length = REQUEST.unpack(await reader.receive_exactly(REQUEST.size))
            if length > MOST_BODY_BYTES.get(kind, -1):
                message = f"a request of kind {kind} with {length} bytes; it is not of this protocol, or too large"
                await _send(stream, _refusal(number, message))
                raise ProtocolError(message)
            with anyio.fail_after(BODY_S):
                body = await reader.receive_exactly(length) if length else b""
            await _send(stream, await self._reply(kind, number, body))

    async def _reply(self, kind: int, number: int, body: bytes) -> bytes:
        if kind == PROBE:
            return REPLY.pack(DONE, number, 0.0, 0.0, 0)
        asked_s = time.perf_counter()
        async with self._turn:
            started_s = time.perf_counter()
            try:
                arrays = await anyio.to_thread.run_sync(functools.partial(self._compute, kind, body))
                packed = pack_arrays(arrays)
            except EdgeRunError as error:
                _log.info("refused a frame: %s", error)
                return _refusal(number, str(error))
            except Exception as error:  # one frame's trouble is no reason to stop serving the others
                _log.exception("a frame failed")
                return _refusal(number, f"the server failed over this frame ({type(error).__name__})")
            queue_s, computed_s = started_s - asked_s, time.perf_counter() - started_s
        return REPLY.pack(DONE, number, queue_s, computed_s, len(packed)) + packed

    def _compute(self, kind: int, body: bytes) -> list[NDArray[Any]]:
        fingerprint = body[1 : 1 + FINGERPRINT_BYTES] if kind == CODE else body[:FINGERPRINT_BYTES]
        tail = self._tails.get(fingerprint)
        if tail is None:
            known = ", ".join(one.hex() for one in self._tails)
            raise ProtocolError(
                f"frame: fingerprint {fingerprint.hex()}; the tails here have {known}: give both sides "
                "the files of one training"
            )
        return tail.answer(kind, body)


def _refusal(number: int, message: str) -> bytes:
    text = message.encode()[:1000]
    return REPLY.pack(REFUSED, number, 0.0, 0.0, len(text)) + text


def _keep_alive(connection: socket.socket) -> None:
    """Let the system ask now and then whether the other side is there; else its place would be taken for an hour."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _send(stream: anyio.abc.SocketStream, data: bytes) -> None:
    with anyio.fail_after(SEND_S):
        await stream.send(data)
