"""Malformed requests, many, against a real `edge-run serve`: it goes on, its memory stays flat, nothing in it fails.

    python benchmarks/serve_fuzz.py [--requests 100000] [--model MODEL] [--clients 4] [--seed 1]

Requests are of four kinds: bytes that are no HTTP, HTTP that is broken (lengths, chunks, headers, methods, paths), JSON
that is broken or of other kinds than it should be, and right JSON with one value made wrong. Each has a connection of
its own or shares one. A status of 5xx other than 503, a server that is gone, or one that takes more memory at the end
than 10 MiB over what it took after the first tenth, fails. It prints a line of JSON, and with `--write` keeps it as a
dated result.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from _box import write_results
from _usage import resident_bytes

from edge_run.base.units import MIB

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kit_models import KIT
from served import TEMPLATE, Served, served

READ_S = 30.0
MOST_GROWTH_BYTES = 10 * MIB
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Hi"}]
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": MESSAGES, "max_tokens": 1, "temperature": 0, "stop": ["x"], "tools": [TOOL], "n": 1, "seed": 1,
        "response_format": {"type": "json_object"}, "logit_bias": {"5": 1}, "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": ["Hi"], "max_tokens": 1, "top_p": 0.5, "logprobs": 2, "cache_salt": "s"},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 1, "instructions": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1, "system": "x", "stop_sequences": ["x"]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 1}, "stream": False, "keep_alive": "5m"},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 1}, "format": SCHEMA, "stream": False},
    "/api/show": {"model": "x"},
    "/completion": {"prompt": "Hi", "n_predict": 1, "json_schema": SCHEMA},
    "/tokenize": {"content": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": MESSAGES},
}  # fmt: skip
WRONG: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, -0.0, 0.5, "", "x", "\x00", "\ud800", "é" * 300,
    "{{ 7*7 }}", "../../etc/passwd", "http://127.0.0.1:1/", [], [[]], [None], {}, {"a": 1}, {"type": "x"},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, {"$ref": "http://127.0.0.1:1/"},
    {"type": "string", "pattern": "(a*)*b"}, [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"type": "function"}], "x" * 5000, [1] * 2000,
]  # fmt: skip
HEADERS = [b"Content-Length: -1", b"Content-Length: 9999999999", b"Content-Length: x", b"Transfer-Encoding: chunked",
           b"Content-Encoding: gzip", b"Host: evil.example", b"Origin: http://evil.example", b"X: " + b"y" * 9000,
           b"Expect: 100-continue", b"Upgrade: websocket", b"\xff\xfe: \x00", b"Content-Type: text/plain"]  # fmt: skip
METHODS = [b"POST", b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"FOO", b"", b"P\x00ST"]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value within a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inner for found in places(one, (*path, key)))]


def with_wrong(document: Any, chance: random.Random) -> Any:
    """Return a document with one value replaced, left out, or moved under another name."""
    made = json.loads(json.dumps(document))
    *way, last = chance.choice([place for place in places(made) if place])
    parent = made
    for key in way:
        parent = parent[key]
    if chance.random() < 0.15:
        del parent[last]
    else:
        parent[last] = chance.choice(WRONG)
    return made


def body_of(document: Any, chance: random.Random) -> bytes:
    """Return JSON that is right, or broken somewhere."""
    body = json.dumps(with_wrong(document, chance)).encode()
    kind = chance.random()
    if kind < 0.6:
        return body
    if kind < 0.7:
        return body[: chance.randrange(len(body) + 1)]
    if kind < 0.8:
        at = chance.randrange(len(body))
        return body[:at] + bytes(chance.randrange(256) for _ in range(3)) + body[at:]
    if kind < 0.85:
        return b"[" * chance.choice([10, 100, 5000])
    if kind < 0.9:
        return b"9" * chance.choice([30, 5000])
    return chance.choice([b"", b"null", b"\xef\xbb\xbf{}", b"NaN", b'{"a":1,"a":2}', b"[]", b'"x"'])


def request_of(chance: random.Random) -> tuple[bytes, bool]:
    """Return the bytes of a request that is wrong somewhere, and whether it is HTTP as it should be."""
    path, document = chance.choice([*RIGHT.items()])
    kind = chance.random()
    if kind < 0.05:
        noise = [chance.randbytes(chance.randrange(1, 200)), b"\r\n" * 20, b"\x16\x03\x01" + b"\x00" * 60]
        return chance.choice(noise), False
    body = body_of(document, chance)
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"Host: 127.0.0.1", b"Content-Length: %d" % len(body)]
    if kind < 0.25:
        lines[0] = chance.choice(METHODS) + b" " + chance.choice(
            [path.encode(), b"/", b"/v1/../x", b"//", b"*", b"/%00", b"/\xff", b"/v1/models/" + b"a" * 3000, b"/page/x"]
        ) + chance.choice([b" HTTP/1.1", b" HTTP/9.9", b"", b" HTTP/1.0"])  # fmt: skip
    if kind < 0.4:
        lines.insert(chance.randrange(1, len(lines) + 1), chance.choice(HEADERS))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body, kind >= 0.4


def status_of(server: Served, data: bytes, is_http: bool, chance: random.Random) -> str:
    """Send a request; return the status that came, or `closed` or `silent`."""
    with server.connect() as connection:
        connection.settimeout(READ_S)
        try:
            connection.sendall(data)
            if chance.random() < 0.05:
                return "left"  # without waiting for the answer
            if not is_http:
                connection.shutdown(socket.SHUT_WR)  # or the server would wait for the rest
            answer = b""
            while len(answer) < 12 and (piece := connection.recv(4096)):
                answer += piece
        except TimeoutError:
            return "silent"
        except OSError:
            return "closed"
        return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"


class Fuzz:
    """Clients that send what is wrong, and what came of it."""

    def __init__(self, server: Served, n_requests: int, seed: int) -> None:
        self.server, self.left, self.seed = server, n_requests, seed
        self.statuses = collections.Counter[str]()
        self.failures: list[str] = []
        self._turn = threading.Lock()

    def run(self, number: int) -> None:
        """Send requests until all are sent."""
        chance = random.Random(self.seed * 1000 + number)
        while True:
            with self._turn:
                if not self.left:
                    return
                self.left -= 1
            data, is_http = request_of(chance)
            try:
                status = status_of(self.server, data, is_http, chance)
            except OSError as error:
                status = f"no connection: {error}"
            with self._turn:
                self.statuses[status] += 1
                is_theirs = status.startswith("5") and status != "503"  # a mistake of the server's
                if is_theirs or status == "silent" or status.startswith("no"):
                    self.failures.append(f"{status}: {data[:300]!r}")


def main() -> None:
    """Send them all; say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--model", type=Path, default=KIT)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep what came of it as a result")
    given = parser.parse_args()
    with served(
        given.model, "-c", 256, "-t", 1, "-n", 1, "--chat-template", TEMPLATE, program=("-m", "edge_run")
    ) as server:
        fuzz = Fuzz(server, given.requests, given.seed)
        began_s, sizes = time.monotonic(), list[int]()
        threads = [threading.Thread(target=fuzz.run, args=(number,), daemon=True) for number in range(given.clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            done = given.requests - fuzz.left
            if done >= given.requests * (1 + len(sizes)) / 10:
                sizes.append(resident_bytes(server.process.pid))
                print(f"{done} sent, {sizes[-1] >> 20} MiB", file=sys.stderr)
        is_alive = server.process.poll() is None
        growth = (resident_bytes(server.process.pid) if is_alive else 0) - sizes[0] if sizes else 0
        mistakes = [line for line in server.said.splitlines() if "mistake of" in line]
        found = {
            "requests": given.requests,
            "seconds": round(time.monotonic() - began_s, 1),
            "statuses": dict(fuzz.statuses.most_common()),
            "resident_bytes": sizes,
            "growth_bytes": growth,
            "is_alive": is_alive,
            "failed": len(fuzz.failures),
            "failures": fuzz.failures[:10],
            "errors": len(mistakes),
            "errors_logged": mistakes[:10],
        }
    print(json.dumps(found))
    if given.write:
        write_results("serve-fuzz", [found], f"{(__doc__ or '').strip()}\n\n{table(found)}")
    if fuzz.failures or not is_alive or growth > MOST_GROWTH_BYTES or mistakes:
        sys.exit(1)


def table(found: dict[str, Any]) -> str:
    """Return what came of it, for a reader."""
    statuses = ", ".join(f"{status}: {number:,}" for status, number in found["statuses"].items())
    sizes = ", ".join(f"{size / MIB:.1f}" for size in found["resident_bytes"])
    went_on = "the server went on" if found["is_alive"] else "the server was gone"
    is_flat = "met" if found["growth_bytes"] <= MOST_GROWTH_BYTES else "not met"
    return (
        f"{found['requests']:,} requests, of which {found['failed']:,} failed, with {found['errors']:,} "
        f"mistakes of the server's own in its log; {went_on}. Statuses (`closed`: the connection ended without one; "
        f"`left`: the client did not wait): {statuses}.\n\n"
        f"Memory after each tenth, MiB: {sizes}; at the end {found['growth_bytes'] / MIB:+.1f} against the first "
        f"(reach {MOST_GROWTH_BYTES / MIB:.0f}: {is_flat})."
    )


if __name__ == "__main__":
    main()
