"""A broker that loses connections: amqtt. It replaces a session by another of the same name, and leaves the old open.

amqtt_broker.py PORT: serves whoever comes, until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from program import ending, next_line


@contextlib.contextmanager
def amqtt(port: int) -> Iterator[None]:
    """Run it in this block."""
    command = [sys.executable, "-W", "ignore", __file__, str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with ending(subprocess.Popen(command, **pipes)) as process:
        assert next_line(process) == b"ready\n"
        yield


async def main(port: str) -> None:
    from amqtt.broker import Broker

    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}", "max_connections": 50}},
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
    )
    await broker.start()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
