"""Clients that stream completions in llama-server's own words, which both servers speak, and note when tokens came."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PATH = "/completion"
LINE_BYTES = 1 << 24


@dataclass
class Answered:
    """What a client saw.

    asked_s: when it asked, by `time.monotonic`. status: of HTTP; 0 where the connection broke. moments: when tokens
    came, and how many. token_ids: these. is_whole: whether the answer came to its end.
    """

    asked_s: float
    status: int = 0
    moments: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_whole: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return sum(number for _, number in self.moments)

    @property
    def first_s(self) -> float:
        """How long the first token took."""
        return self.moments[0][0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between pieces."""
        times = [moment for moment, _ in self.moments]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


async def ask(host: str, port: int, prompt: Sequence[int] | str, tokens: int, limit_s: float, **more: Any) -> Answered:
    """Have an answer of so many tokens made, greedily; an end that comes earlier is not chosen."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True, **more}
    found = Answered(time.monotonic())
    try:
        await asyncio.wait_for(_stream(host, port, json.dumps(body).encode(), found), limit_s)
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.TimeoutError):
        found.is_whole = False
    return found


async def _stream(host: str, port: int, body: bytes, found: Answered) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
    try:
        head = f"POST {PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        found.status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            piece = json.loads(line[6:])
            if tokens := [] if piece.get("stop") else piece.get("tokens", []):
                found.moments.append((time.monotonic(), len(tokens)))
                found.token_ids += tokens
            found.is_whole = found.is_whole or bool(piece.get("stop"))
    finally:
        writer.close()


def ask_at(
    host: str, port: int, requests: Sequence[tuple[float, Sequence[int] | str, int]], limit_s: float, **more: Any
) -> list[Answered]:
    """Send requests, each `(seconds from now, prompt, tokens)`; return what came of them, in order.

    limit_s: after so long a client goes away.
    """

    async def one(wait_s: float, prompt: Sequence[int] | str, tokens: int) -> Answered:
        await asyncio.sleep(wait_s)
        return await ask(host, port, prompt, tokens, limit_s, **more)

    async def all_of_them() -> list[Answered]:
        return await asyncio.gather(*(one(*request) for request in requests))

    return asyncio.run(all_of_them())
