"""The process of the embedded broker, which ends when its standard input ends, however its parent ended.

The first line of standard input is a JSON object with host, port and access rights. Each further line has the access
rights from then on. Lines of standard output are JSON objects: `ready`, `error` or `log`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from typing import Any

from edge_run.base.errors import ProtocolError, reason_of
from edge_run.devices.broker.access import parse_access
from edge_run.devices.broker.server import MOST_CONNECTIONS, MqttServer

MOST_LINE, END_S = 4 << 20, 2.0
_SPARE_FILES = 32


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one ends it
    request = json.loads(sys.stdin.buffer.readline(MOST_LINE))
    try:
        asyncio.run(_serve(request))
    except OSError as error:
        _say({"error": reason_of(error)})
        sys.exit(1)


async def _serve(request: dict[str, Any]) -> None:
    os.set_blocking(sys.stdout.fileno(), False)  # nobody waits here for who does not read
    server = MqttServer(parse_access(request["access"]), lambda line: _say({"log": line}), _most_connections())
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: server.note_mistake(context.get("exception") or context["message"]))
    serving = asyncio.create_task(
        server.serve(request["host"], request["port"], lambda: _say({"ready": True})), name="edge-run broker"
    )
    threading.Thread(target=_read, args=(loop, server, serving), name="edge-run broker input", daemon=True).start()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _read(loop: asyncio.AbstractEventLoop, server: MqttServer, serving: asyncio.Task[None]) -> None:
    """Hand on what standard input says; at its end, end everything."""
    with contextlib.suppress(OSError, RuntimeError):  # the loop has ended
        while line := sys.stdin.buffer.readline(MOST_LINE):
            try:
                loop.call_soon_threadsafe(server.set_access, parse_access(json.loads(line)))
            except (ValueError, ProtocolError) as error:
                _say({"log": f"an access that is none ({error}); the one before stays"})
        loop.call_soon_threadsafe(serving.cancel)
    threading.Event().wait(END_S)
    os._exit(0)  # the loop is stuck


def _say(words: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # full, or nobody reads
        os.write(sys.stdout.fileno(), json.dumps(words).encode() + b"\n")


def _most_connections() -> int:
    """Return how many connections this process may have, with files left for itself."""
    try:
        import resource
    except ImportError:
        return MOST_CONNECTIONS
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_FILES)
