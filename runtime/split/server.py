"""`edge-run split serve`: the tails of bundles behind a TCP port."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import mmap
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ConfigError, EdgeRunError, NotSupported, ProtocolError, reason_of
from edge_run.devices.link.hosts import place_text
from edge_run.partition.split_choice import CODE, IMAGE, FrameCost
from edge_run.runtime.split.admission import ConnectionSlot, ConnectionSlots, FrameQueue, NoSlot, QueuedFrame
from edge_run.runtime.split.bundle import MODEL_FILE, TAIL_FILE, read_bundle
from edge_run.runtime.split.images import decode_image
from edge_run.runtime.split.onnx_session import median_s, run_session
from edge_run.runtime.split.protocol import (
    ASK_CODE,
    ASK_IMAGE,
    ASK_PROBE,
    DONE,
    FINGERPRINT_BYTES,
    MOST_BODY_BYTES,
    MOST_PATIENCE_S,
    MOST_REPLY_BYTES,
    REFUSED,
    REPLY,
    REQUEST,
    make_full_hello,
    make_hello,
    pack_arrays,
)

SILENCE_S = 10.0  # a device that is there probes more often
LEAST_BYTES_PER_S = 1 << 20  # of a request's body and of an answer, beyond the first seconds
PIECE_BYTES = 1 << 16
PAUSE_S = 0.1
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, TimeoutError)
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a device without power is gone in a minute
_log = logging.getLogger(__name__)


class Tail:
    """The networks of one bundle, opened. Thread-safe."""

    def __init__(self, path: Path, threads: int | None) -> None:
        """Open the tail and the uncut network. Raises ModelFileError, TierReadError."""
        self._path = path
        self._bundle = read_bundle(path)
        self._tail, self._model = self._bundle.open(TAIL_FILE, threads), self._bundle.open(MODEL_FILE, threads)
        self.fingerprint = self._bundle.codec.fingerprint

    def measure(self) -> dict[str, FrameCost]:
        """Return what each kind of frame takes, as measured.

        Raises NotSupported where its answers cannot be sent.
        """
        latent = np.zeros((1, *self._bundle.code.latent), dtype=np.float32)
        pixels = np.zeros((1, *self._bundle.code.input), dtype=np.uint8)
        found = dict[str, FrameCost]()
        for kind, session, value in ((CODE, self._tail, latent), (IMAGE, self._model, pixels)):
            answer_bytes = len(pack_arrays(run_session(session, value)))
            if answer_bytes > MOST_REPLY_BYTES:
                raise NotSupported(
                    f"{self._path}: answers a frame with {answer_bytes:,} bytes, at most {MOST_REPLY_BYTES:,} are "
                    "sent; let the network make less of a frame, such as classes instead of scores"
                )
            found[kind] = FrameCost(median_s(functools.partial(run_session, session, value)), answer_bytes)
        return found

    def answer(self, kind: int, body: bytes) -> list[NDArray[Any]]:
        """Return the network's answers to a code or an image. Raises ProtocolError for one that is damaged."""
        if kind == ASK_IMAGE:
            return run_session(self._model, decode_image(body[FINGERPRINT_BYTES:], self._bundle.size)[None])
        tensor, _ = self._bundle.codec.decode(body, self._bundle.positions)
        return run_session(self._tail, tensor.reshape(1, *self._bundle.code.latent))


@dataclass(frozen=True, slots=True)
class FrameAnswer:
    """What a server answers to a frame.

    packed: the arrays.
    queue_s: that the frame waited.
    computed_s: that it took then.
    """

    packed: bytes
    queue_s: float
    computed_s: float


class Frames:
    """Computes the frames of devices, one at a time, with the networks of several bundles."""

    def __init__(self, paths: Sequence[Path], threads: int | None) -> None:
        """Open the bundles. Raises as `SplitServer`."""
        opened = [Tail(path, threads) for path in paths]
        self._tails = {tail.fingerprint: tail for tail in opened}
        if len(self._tails) != len(opened):
            raise ConfigError("split serve: two of the tails are the same; name each once")
        self._measured = {tail.fingerprint: tail.measure() for tail in opened}
        self._queue = FrameQueue()
        for fingerprint, costs in self._measured.items():
            for kind, one in costs.items():
                self._queue.took((fingerprint, kind), one.seconds)
        self._turn = anyio.CapacityLimiter(1)  # two passes at once would only slow each other down

    def costs(self) -> dict[str, dict[str, FrameCost]]:
        """Return what frames take now, by fingerprint and kind of mode."""

        def now(key: tuple[bytes, str], measured: FrameCost) -> FrameCost:
            return dataclasses.replace(measured, seconds=self._queue.usual_s(key))

        return {
            fingerprint.hex(): {kind: now((fingerprint, kind), one) for kind, one in costs.items()}
            for fingerprint, costs in self._measured.items()
        }

    def wait_s(self) -> float:
        """Return how long a frame that came now would wait."""
        return self._queue.wait_s(time.monotonic())

    async def answer(self, kind: int, body: bytes, until_s: float, is_gone: Callable[[], bool]) -> FrameAnswer | None:
        """Return the answer to a frame; None where its device has gone before it was computed.

        until_s: by the clock, when the device waits no longer. Raises EdgeRunError for a frame that cannot be computed,
        or not in time.
        """
        fingerprint = body[1 : 1 + FINGERPRINT_BYTES] if kind == ASK_CODE else body[:FINGERPRINT_BYTES]
        tail = self._tails.get(fingerprint)
        if tail is None:
            known = ", ".join(one.hex() for one in self._tails)
            raise ProtocolError(
                f"frame: fingerprint {fingerprint.hex()}; the tails here have {known}: give both sides "
                "the files of one training"
            )
        key, came_s = (fingerprint, CODE if kind == ASK_CODE else IMAGE), time.monotonic()
        frame = self._queue.come(key, until_s, is_gone)
        try:
            self._check(frame)  # who cannot be served in time is told at once
            async with self._turn:
                if is_gone():
                    return None
                self._check(frame)
                started_s = time.monotonic()
                self._queue.begin(frame, started_s)
                packed = pack_arrays(await anyio.to_thread.run_sync(tail.answer, kind, body))
                computed_s = time.monotonic() - started_s
                self._queue.took(key, computed_s)
                return FrameAnswer(packed, started_s - came_s, computed_s)
        finally:
            self._queue.leave(frame)

    def _check(self, frame: QueuedFrame) -> None:
        if why := self._queue.refusal(frame, time.monotonic()):
            raise NotSupported(why)


class SplitServer:
    """Answers the frames of devices: codes with the tail that they name, images with the uncut network."""

    def __init__(self, tails: Sequence[Path], threads: int | None = None) -> None:
        """Open the bundles.

        Raises ConfigError for none, or two of one fingerprint; ModelFileError, NotSupported, TierReadError.
        """
        if not tails:
            raise ConfigError("split serve: needs at least one tail.onnx")
        self._frames = Frames(tails, threads)

    async def serve(self, host: str, port: int, ready: Callable[[int], None]) -> None:
        """Serve until cancelled. ready: told the port, once it is open. Raises NotSupported where it cannot be."""
        try:
            listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except (OSError, ValueError) as error:  # a value: a name that no host can have
            reason = reason_of(error)
            raise NotSupported(
                f"{place_text(host, port)}: cannot be listened at ({reason}); choose another --host or --port"
            ) from error
        self._slots = ConnectionSlots()
        async with listener:
            ready(listener.extra(anyio.abc.SocketAttribute.local_port))  # before the group, which would wrap its error
            async with anyio.create_task_group() as group:
                for one in listener.listeners:
                    assert isinstance(one, anyio.abc.SocketListener)
                    group.start_soon(self._accept, one, group, name="split-accept")

    async def _accept(self, listener: anyio.abc.SocketListener, group: anyio.abc.TaskGroup) -> None:
        """Welcome whoever connects. A connection that fails, or that there is no file descriptor for, is no end."""
        is_exhausted = False
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    if not is_exhausted:
                        _log.warning("a device cannot be let in now (%s)", reason_of(error))
                    is_exhausted = True
                    self._slots.make_room()
                await anyio.sleep(PAUSE_S)
            else:
                is_exhausted = False
                group.start_soon(self._welcome, stream, name="split-device")

    async def _welcome(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            with anyio.CancelScope() as scope, contextlib.suppress(OSError, anyio.TypedAttributeLookupError):
                address = str(stream.extra(anyio.abc.SocketAttribute.remote_address)[0])
                try:
                    slot = self._slots.enter(address, scope.cancel, time.monotonic())
                except NoSlot as error:
                    _log.info("a device is not let in: %s", error)
                    with contextlib.suppress(*_GONE):
                        await _send(stream, make_full_hello(str(error)))
                    return
                try:
                    _keep_alive(stream.extra(anyio.abc.SocketAttribute.raw_socket))
                    await self._talk(stream, slot)
                except _GONE:
                    _log.debug("a device has gone, or says nothing")
                except ProtocolError as error:
                    _log.warning("a device was refused: %s", error)
                except Exception:  # one device's trouble, such as too little memory, is none of the others
                    _log.exception("a device's connection failed")
                finally:
                    self._slots.leave(slot)

    async def _talk(self, stream: anyio.abc.SocketStream, slot: ConnectionSlot) -> None:
        """Answer the requests of one device, until it goes, is silent, or says what cannot be."""
        await _send(stream, make_hello(self._frames.costs()))
        while True:
            with anyio.fail_after(SILENCE_S):
                kind, number, patience_s, length = REQUEST.unpack(await self._receive(stream, REQUEST.size, slot))
            until_s = time.monotonic() + patience_s
            if length > MOST_BODY_BYTES.get(kind, -1) or not 0 <= patience_s <= MOST_PATIENCE_S:
                message = (
                    f"a request of kind {kind} with {length} bytes and {patience_s:g} s of time; "
                    "it is not of this protocol, or too large"
                )
                await _send(stream, _refusal(number, message))
                raise ProtocolError(message)
            with anyio.fail_after(_patience_s(length)):
                body = await self._receive(stream, length, slot)
            self._slots.begin_answer(slot)
            reply = await self._reply(kind, number, body, until_s, functools.partial(_is_gone, stream))
            del body
            self._slots.begin_sending(slot, len(reply), time.monotonic())
            await _send(stream, reply)
            del reply
            self._slots.answered(slot, time.monotonic())

    async def _receive(self, stream: anyio.abc.SocketStream, length: int, slot: ConnectionSlot) -> bytes:
        """Return so many bytes, which count as they come: what is only announced takes no memory.

        They are gathered in pages of their own, which go back to the system at once: many that grow side by side on
        the heap would leave holes in it as large as they are.
        """
        with mmap.mmap(-1, max(length, 1)) as pages:
            while (missing := length - pages.tell()) > 0:
                piece = await stream.receive(min(missing, PIECE_BYTES))
                self._slots.hold(slot, len(piece))
                pages.write(piece)
            return pages[:length]

    async def _reply(self, kind: int, number: int, body: bytes, until_s: float, is_gone: Callable[[], bool]) -> bytes:
        if kind == ASK_PROBE:
            return REPLY.pack(DONE, number, self._frames.wait_s(), 0.0, 0)
        try:
            found = await self._frames.answer(kind, body, until_s, is_gone)
        except EdgeRunError as error:
            _log.info("refused a frame: %s", error)
            return _refusal(number, str(error))
        except Exception:  # one frame's trouble is no reason to stop serving the others
            _log.exception("a frame failed")
            return _refusal(number, "the server failed over this frame; its log says more")
        if found is None:
            raise anyio.BrokenResourceError
        return REPLY.pack(DONE, number, found.queue_s, found.computed_s, len(found.packed)) + found.packed


def _refusal(number: int, message: str) -> bytes:
    text = message.encode()[:1000]
    return REPLY.pack(REFUSED, number, 0.0, 0.0, len(text)) + text


def _is_gone(stream: anyio.abc.SocketStream) -> bool:
    """Return whether the other side has reset the connection, as `ServerLink` does when it is closed."""
    poll = select.poll()
    try:
        poll.register(stream.extra(anyio.abc.SocketAttribute.raw_socket), 0)  # what is wrong is told in any case
    except (OSError, ValueError):  # closed here
        return True
    return bool(poll.poll(0))


def _keep_alive(connection: socket.socket) -> None:
    """Let the system ask now and then whether the other side is there; else its slot would be taken for longer."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _send(stream: anyio.abc.SocketStream, data: bytes) -> None:
    with anyio.fail_after(_patience_s(len(data))):
        await stream.send(data)


def _patience_s(count: int) -> float:
    """Return how long so many bytes may take."""
    return SILENCE_S + count / LEAST_BYTES_PER_S
