"""A broker for where there is none: amqtt, on a thread of its own, as long as this device takes part.

It speaks MQTT 3.1.1, takes whoever comes, and forgets everything when it ends. Members rely on it for nothing else:
each message is signed, and presence is their own heartbeat. By default only this device reaches it.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from edge_run.base.errors import ConfigError, MeshError
from edge_run.base.extras import need

START_S = 10.0


class EmbeddedBroker:
    """Listens on `host`:`port` until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        """Start it. Raises MeshError where it cannot listen there."""
        self._place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._broker_class = need("amqtt.broker", "mesh").Broker
        for name in ("amqtt", "transitions"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is raised here
        self._started, self._error = threading.Event(), ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="edge-run broker", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S) or self._error:
            self.close()
            raise MeshError(
                f"broker: cannot listen on {self._place} ({self._error or 'it does not start'}); end what listens "
                "there, or choose another place: `edge-run mesh init --serve HOST:PORT --replace`"
            )

    def close(self) -> None:
        """End it. Idempotent."""
        if self._loop is not None and self._ended is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(timeout=START_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # of amqtt's many kinds
            self._error = str(error.__cause__ or error)
        self._started.set()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        config = {
            "listeners": {"default": {"type": "tcp", "bind": self._place, "max_connections": 300}},
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
        broker = self._broker_class(config)
        writers: set[asyncio.StreamWriter] = set()
        serve_one = broker.stream_connected

        async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **names: str) -> None:
            writers.add(writer)  # amqtt itself leaves some open
            try:
                await serve_one(reader, writer, **names)
            finally:
                writers.discard(writer)
                writer.close()

        broker.stream_connected = serve_and_close
        await broker.start()
        self._started.set()
        await self._ended.wait()
        await broker.shutdown()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.05)  # connections close on the loop


def parse_place(text: str, default_port: int) -> tuple[str, int]:
    """Return host and port of HOST[:PORT]; an IPv6 address stands in brackets. Raises ConfigError."""
    host, _, port = (
        text.rpartition(":") if text.rpartition(":")[2].isdigit() and "]" not in text[-1:] else (text, "", "")
    )
    host = host.strip("[]")
    if not host or (port and not 0 < int(port) < 65536):
        raise ConfigError(f"{text}: must be HOST or HOST:PORT")
    return host, int(port) if port else default_port
