"""The connection of a device to its server: a thread keeps it, measures it, and finds the server again.

There are two TCP connections. Frames have one for themselves, so that no frame waits behind a probe's reply; and none
is given up for what becomes of a probe, which may wait behind a frame.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from edge_run.base.errors import ProtocolError
from edge_run.partition.split_choice import Chooser
from edge_run.runtime.split.protocol import ASK_PROBE, LinkLost, Reply, ServerLink

PROBE_EVERY_S = 0.2
FRAMES_TELL_S = (
    0.5  # no probe after a frame was answered: it showed what there is to know, and would wait for the probe
)
PROBE_TAKES_S = 0.01  # of the link's time, about; a probe is never so large that it would clog a link grown slow
LEAST_PROBE_BYTES, MOST_PROBE_BYTES = 256, 2048
PROBE_LIMIT_S, CONNECT_LIMIT_S = 2.0, 2.0
PATIENT_LIMIT_S = 10.0  # of a probe that may wait behind a frame
STAY_S = 3.0  # after so long without a word each connection says something: a server drops who is silent for 10 s
FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.05, 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sample:
    """What two probes showed of the link, and of the server's queue."""

    empty_s: float
    size_bytes: int
    full_s: float
    queue_s: float


class ServerConnection:
    """Keeps the connections to a server. `ask` is for one thread at a time; the chooser is used under `lock` only."""

    def __init__(self, address: tuple[str, int], fingerprint: str, chooser: Chooser, lock: threading.Lock) -> None:
        """Take the server's address, and the fingerprint of the bundle that it must have."""
        self._address, self._fingerprint, self._chooser, self._lock = address, fingerprint, chooser, lock
        self._frames: ServerLink | None = None
        self._asked: ServerLink | None = None  # by the frame at hand, or the last one
        self._is_closed = threading.Event()
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="edge-run-split-link", daemon=True)
        self._answered_s = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._speaking = threading.RLock()  # held by who uses the connection of the frames
        self.problem = "not connected yet"

    def start(self, limit_s: float) -> None:
        """Begin, and wait until the first attempt has come to something, at most `limit_s`. What is raised ends it."""
        try:
            self._thread.start()
            self._tried.wait(limit_s)
        except BaseException:  # Ctrl-C: nobody will have it, to close it
            self.close()
            raise

    def ask(self, kind: int, body: bytes, limit_s: float) -> Reply:
        """Return the server's reply to a frame. Raises LinkLost, or FrameRefused where the server refuses it."""
        link = self._asked = self._frames
        if link is None:
            raise LinkLost(self.problem)
        end_s = time.monotonic() + limit_s
        try:
            if not self._speaking.acquire(timeout=limit_s):
                raise LinkLost("the server did not answer in time")
            if (left_s := end_s - time.monotonic()) <= 0:
                raise LinkLost("the server did not answer in time")
            reply = link.ask(kind, body, left_s)
        finally:
            try:  # noqa: SIM105 -- `suppress` is Python: Ctrl-C within it would leave the lock taken
                self._speaking.release()
            except RuntimeError:  # it was not had
                pass
        self._answered_s = time.monotonic()
        return reply

    def lose(self, reason: str, *, was_asked: bool = False) -> None:
        """Give up the connection; the thread makes another one when the server is back.

        was_asked: only the one that was asked last, in place of which the thread may have made another by now.
        """
        with self._lock:
            if was_asked and self._frames is not self._asked:
                return
            self._chooser.server_lost()
            link, self._frames = self._frames, None
            self.problem = reason
        if link is not None:
            link.close()

    def close(self) -> None:
        """End the connection and the thread; again is no harm."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join(PROBE_LIMIT_S + CONNECT_LIMIT_S)
        self.lose("closed")

    def _keep(self) -> None:
        while not self._is_closed.is_set():
            try:
                with contextlib.closing(ServerLink(self._address, CONNECT_LIMIT_S)) as probes:
                    frames = self._meet(probes)
                    self._tried.set()
                    self._watch(probes, frames)
            except (LinkLost, ProtocolError) as error:
                self._miss(str(error))
            except Exception as error:  # whatever it is: no other thread would find the server again
                _log.info("server %s: what was not expected", self._address[0], exc_info=True)
                self._miss(f"{self._address[0]}: {type(error).__name__}: {error}")
            self._tried.set()
            self._is_closed.wait(self._backoff_s * random.uniform(0.5, 1.5))
            self._backoff_s = min(self._backoff_s * 2, MOST_BACKOFF_S)
        self.lose("closed")  # also what was connected to after `close` had waited for long enough

    def _miss(self, reason: str) -> None:
        """Note that the server cannot be connected to: a connection that the frames have is kept where it answers."""
        frames = self._frames
        if frames is None:
            self.lose(reason)
        else:
            self._stay(frames)

    def _meet(self, probes: ServerLink) -> ServerLink:
        """Measure link and server; return the connection of the frames: the one that there is, or a new one."""
        costs = probes.hello.get(self._fingerprint)
        if costs is None:
            known = ", ".join(probes.hello) or "none"
            raise ProtocolError(
                f"server: has no tail for {self._fingerprint} (it has {known}); give both the files of one training"
            )
        samples = [self._measure(probes, LEAST_PROBE_BYTES) for _ in range(2)]
        frames = self._frames
        if frames is None:
            frames = ServerLink(self._address, CONNECT_LIMIT_S)
            with self._lock:
                self._frames, self.problem = frames, ""
                self._chooser.server_back(costs, samples[-1].queue_s)
            _log.info("server %s: connected", self._address[0])
        else:
            self._stay(frames)  # it may have gone with that of the probes
        self._tell(samples)
        self._backoff_s = FIRST_BACKOFF_S
        return frames

    def _watch(self, probes: ServerLink, frames: ServerLink) -> None:
        """Measure link and server, and keep both connections, until one of them has gone.

        While a frame is under way nothing is measured, as a probe would wait behind it; but nobody falls silent.
        """
        size_bytes = LEAST_PROBE_BYTES
        stayed_s = probed_s = time.monotonic()
        while not self._is_closed.wait(PROBE_EVERY_S) and self._frames is frames:
            now_s = time.monotonic()
            if now_s - max(stayed_s, self._answered_s) > STAY_S and self._stay(frames):
                stayed_s = now_s
            with self._between_frames() as is_free:
                pass
            is_silent = now_s - probed_s > STAY_S
            if not is_silent and not (is_free and now_s - self._answered_s > FRAMES_TELL_S):
                continue
            try:
                if not is_free:
                    probes.ask(ASK_PROBE, b"", PATIENT_LIMIT_S)
                    probed_s = time.monotonic()
                    continue
                sample, probed_s = self._measure(probes, size_bytes), now_s
            except (LinkLost, ProtocolError):
                return  # that of the frames may be well: it shows where the server is met again
            self._tell([sample])
            is_quick = sample.full_s - sample.empty_s < PROBE_TAKES_S / 2
            size_bytes = min(size_bytes * 2, MOST_PROBE_BYTES) if is_quick else LEAST_PROBE_BYTES

    def _stay(self, frames: ServerLink) -> bool:
        """Ask something on the connection of the frames, which keeps it, or lose it; False while a frame does."""
        with self._between_frames() as is_free:
            if is_free:
                try:
                    frames.ask(ASK_PROBE, b"", PROBE_LIMIT_S)
                except (LinkLost, ProtocolError) as error:
                    self.lose(str(error))
        return is_free

    @contextlib.contextmanager
    def _between_frames(self) -> Iterator[bool]:
        """Yield whether no frame is under way; none gets under way in this block then."""
        is_free = self._speaking.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._speaking.release()

    def _measure(self, probes: ServerLink, size_bytes: int) -> _Sample:
        """Return what two probes show, an empty one and one of this size."""
        empty = probes.ask(ASK_PROBE, b"", PROBE_LIMIT_S)
        full = probes.ask(ASK_PROBE, bytes(size_bytes), PROBE_LIMIT_S)
        return _Sample(empty.network_s, size_bytes, full.network_s, full.queue_s)

    def _tell(self, samples: list[_Sample]) -> None:
        with self._lock:
            if self._frames is None:
                return
            for sample in samples:
                self._chooser.crossed(0, sample.empty_s)
                self._chooser.crossed(sample.size_bytes, sample.full_s)
                self._chooser.queued(sample.queue_s)
