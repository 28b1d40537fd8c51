"""A network card of a given speed, where there is no root to make one: a relay before a port of this machine."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

PIECE_BYTES = 2048


@contextlib.contextmanager
def relay(
    target: int, bytes_per_s: float = float("inf"), cut: threading.Event | None = None, delay_s: float = 0.0
) -> Iterator[int]:
    """Pass bytes on to a port and back, at this speed each way, each piece later; give the port that stands for it.

    cut: once it is set, nothing gets to that port any more, and what comes from there still arrives.
    """
    ends: list[socket.socket] = []
    targets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        free_s = time.monotonic()
        with contextlib.suppress(OSError):
            while True:
                is_behind = bool(select.select([source], [], [], 0)[0])  # it came while the last piece was held
                if not (data := source.recv(PIECE_BYTES)):
                    break
                free_s = (free_s if is_behind else max(free_s, time.monotonic())) + len(data) / bytes_per_s
                time.sleep(max(0.0, free_s - time.monotonic()) + delay_s)
                if not (cut and cut.is_set() and sink in targets):
                    sink.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", target))
                ends.extend((near, far))
                targets.append(far)
                for pair in ((near, far), (far, near)):
                    start(pass_on, *pair)

    def start(work: object, *arguments: object) -> None:
        threads.append(threading.Thread(target=work, args=arguments))  # type: ignore[arg-type]
        threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        start(accept)
        try:
            yield listener.getsockname()[1]
        finally:
            # Shut down, joined, then closed: who still asks a socket that is closed asks a number of somebody else's.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            threads[0].join(5)
            for one in ends:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(5)
            for one in ends:
                one.close()
