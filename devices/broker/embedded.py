"""An MQTT broker in a process of its own, for clusters without a broker. The process ends with this one.

The broker speaks MQTT 3.1.1 to clients with a password, bounds everything that it holds (`server.py`), and forgets all
of it when it ends. Members need nothing more of it: each message is signed, and presence is the members' own
heartbeat. By default only this device reaches the broker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections import deque

from edge_run.base.errors import MeshError, reason_of
from edge_run.base.fields import plain
from edge_run.devices.broker.access import BrokerAccess
from edge_run.devices.link.hosts import place_text

START_S, LONGEST_WAIT_S, STUCK_S = 10.0, 30.0, 5.0
MOST_DOUBLINGS = 16  # of a wait, however often it failed
MOST_FINDINGS, MOST_LETTERS = 64, 300
_START = "import sys; sys.path[:] = sys.argv[1:]; from edge_run.devices.broker.child import main; main()"

logger = logging.getLogger(__name__)


class EmbeddedBroker:
    """A broker on `host`:`port` until it is closed. Any thread may use it.

    access: whom it lets in.
    """

    def __init__(self, host: str, port: int, access: BrokerAccess) -> None:
        """Start it. Raises MeshError where it cannot listen there."""
        self._host, self._port, self.access = host, port, access
        self._place = place_text(host, port)
        self._lock, self._started, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self._said = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.findings: deque[str] = deque(maxlen=MOST_FINDINGS)  # whom it dropped, and why
        self._thread = threading.Thread(target=self._run, name="edge-run broker", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S) or not self.is_serving:
            self.close()
            raise MeshError(
                f"broker: cannot listen on {self._place} ({self._said or 'it does not start'}); end what listens "
                "there, or choose another place: `edge-run mesh init --serve HOST:PORT --replace`"
            )

    @property
    def is_serving(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int:
        """Its process."""
        assert self._process is not None, "it was started"
        return self._process.pid

    def set_access(self, access: BrokerAccess) -> None:
        """Let in whom `access` names, from now on: who is not named any more, or has another password, is cut off."""
        with self._lock:
            self.access = access
            if self._process is not None:
                self._write(self._process, access.document())

    def close(self) -> None:
        """End it. Idempotent."""
        with self._lock:
            self._ended.set()
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=START_S)
        if self._process is not None:
            self._process.kill()  # one that was stopped heard nothing of this

    def _run(self) -> None:
        """Start the process, and again when it ends; hand on what it says."""
        attempt = 0
        while not self._ended.is_set():
            started_s = time.monotonic()
            try:
                self._serve()
            except OSError as error:
                self._said = reason_of(error)
            if not self._started.is_set():  # the first one: who wanted it is told
                self._started.set()
                return
            attempt = 0 if time.monotonic() - started_s > LONGEST_WAIT_S else attempt + 1
            if not self._ended.is_set():
                logger.warning("broker: its process ended (%s); another one is started", self._said or "no word")
                self._ended.wait(min(LONGEST_WAIT_S, 0.1 * 2 ** min(attempt, MOST_DOUBLINGS)))

    def _serve(self) -> None:
        """Serve with one process, until it ends. Raises OSError where it cannot be started."""
        command = [sys.executable, "-c", _START, *sys.path]
        with self._lock:
            if self._ended.is_set():
                return
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            self._write(process, {"host": self._host, "port": self._port, "access": self.access.document()})
        with process:
            assert process.stdout is not None
            while line := process.stdout.readline(1 << 16):
                self._hear(line)
            with self._lock, contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()

    def _hear(self, line: bytes) -> None:
        try:
            words = json.loads(line)
            kind, text = next(iter(words.items()))
        except (ValueError, AttributeError, StopIteration):  # a traceback
            kind, text = "error", line.decode("utf-8", "replace")
        if kind == "ready":
            self._said = ""
            self._started.set()
            return
        text = plain(str(text), MOST_LETTERS)
        if kind == "error":
            self._said = text or self._said
        else:
            self.findings.append(text)
            logger.warning("broker: %s", text)

    @staticmethod
    def _write(process: subprocess.Popen[bytes], document: object) -> None:
        assert process.stdin is not None
        stuck = threading.Timer(STUCK_S, process.kill)  # one that takes nothing is stopped, and holds up all else
        stuck.daemon = True
        stuck.start()
        try:
            with contextlib.suppress(OSError, ValueError):  # it ended, and the next one is told at its start
                process.stdin.write(json.dumps(document).encode() + b"\n")
                process.stdin.flush()
        finally:
            stuck.cancel()
