"""The server with a made-up model, for tests of the page: it says again what it is told, counts or waits for ever.

`python page_double.py serve NAME --port N [--key KEY] [--plain]` serves it, and says where as `edge-run serve` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import uvicorn

from catalogues import open_catalogue
from edge_run.base.errors import ConfigError
from edge_run.base.mesh_status import MeshNode, MeshUse
from edge_run.base.results import (
    Backend,
    Forecast,
    IoUse,
    MemoryUse,
    Piece,
    Plan,
    PlanItem,
    Progress,
    Speculation,
    Stats,
)
from edge_run.base.units import GIB, MIB
from edge_run.runtime.server.access import access_for
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.app import make_app
from edge_run.runtime.server.service import Service
from edge_run.runtime.server.serving import bind

COUNT, THINK, LOSE, WAIT = "count", "think", "lose a device", "wait"
PIECE_S = 0.03
ITEMS = {"program": 120, "kv": 384, "buffers": 96, "work": 6, "reserve": 24, "pinned": 1180, "window": 32}
MESH = MeshUse(
    1,
    (
        MeshNode("a1", "desk", tuple(range(12)), 0),
        MeshNode("b2", "shelf", tuple(range(12, 20)), 310 * MIB),
        MeshNode("c3", "attic", tuple(range(20, 28)), 290 * MIB),
    ),
    1, 1, 0.2, 0.2, 0.001, 0, 0, {}, 0, {"d4": "cellar has other numerics"},
)  # fmt: skip


class RepeatingModel:
    """A model that says what it is told, word for word; `count` it answers with numbers without end, `wait` never."""

    def __init__(self, name: str, has_chat_template: bool = True) -> None:
        self.path, self.has_chat_template, self.trained_context_tokens = Path(name), has_chat_template, 32768
        self.keeps_prompts = False
        self.most_parallel, self.notices, self.chat_template = 4, (), "<think>" if has_chat_template else ""
        self.mesh_use, self.embedding = MESH, None
        self.progress: Progress | None = None
        self.began_s, self.context_tokens = time.monotonic(), 4096
        self.speculation = Speculation("ngram", passes=50, drafted=120, accepted=78, tokens_per_pass=2.6)
        self.numerics = "made up"
        self.plan = Plan(
            "streamed", 2 * GIB, GIB, 4 * GIB, ITEMS["pinned"] * MIB, 32 * MIB, 2900 * MIB, 384 * MIB, 4096, 4,
            tuple(PlanItem(what, size * MIB, "") for what, size in ITEMS.items()),
            Forecast(64, 1.0, 9.0, 40.0, 5.1, 0.1, 0.62, "disk"), lent_bytes=400 * MIB,
        )  # fmt: skip

    @property
    def stats(self) -> Stats:
        """Figures of a drive that reads all the time, now faster and now slower."""
        passed_s = time.monotonic() - self.began_s
        read = int(4.2e9 * passed_s + 4e8 * (passed_s * 7 % 3))
        memory = MemoryUse(2 * GIB, 1800 * MIB, ITEMS["pinned"] * MIB, 32 * MIB, 384 * MIB)
        return Stats(1.0, 1, 10, 10, memory, IoUse(read, 0.0, 4.2e9, 0.97), Backend("edge-run"))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Return the last message; after a system prompt that, and the message. Roles must alternate, as Gemma's."""
        roles = [message["role"] for message in messages if message["role"] != "system"]
        if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            raise ConfigError("roles must alternate")
        told = [str(message["content"]) for message in messages if message["role"] == "system"]
        return " ".join([*told, str(messages[-1]["content"])])

    def prompt_tokens(self, text: str) -> list[int]:
        """Return a token for each letter."""
        return [ord(letter) for letter in text]

    async def generate(self, tokens: Sequence[int], **options: Any) -> AsyncGenerator[Piece, None]:
        """Say it again, count, or wait."""
        text, made = "".join(map(chr, tokens)), 0
        most = math.inf if options["max_tokens"] is None else options["max_tokens"]
        if text == WAIT:
            await anyio.sleep_forever()
        if text == LOSE:
            left = dataclasses.replace(MESH.nodes[1], blocks=tuple(range(12, 28)))
            self.mesh_use = dataclasses.replace(MESH, nodes=(MESH.nodes[0], left))
        if text == THINK:
            text = "<think>What was it?</think>It was a thought."
        words = text.split(" ")
        while made < most and (made < len(words) or text == COUNT):
            yield Piece(f"{made} " if text == COUNT else words[made] + " " * (made < len(words) - 1), (0,))
            made += 1
            await anyio.sleep(PIECE_S)
        generation: Any = SimpleNamespace(
            finish_reason="stop", text=text, token_ids=(), prompt_tokens=len(tokens), cached_tokens=0, ttft_s=0.8,
            completion_tokens=made, decode_tokens_per_s=12.3, prefill_tokens_per_s=88.0, mesh=None, logprobs=(),
            io=SimpleNamespace(bytes_read=int(1.4e9)), speculation=self.speculation,
        )  # fmt: skip
        yield Piece("", (), generation)

    def forecast(self) -> Forecast | None:
        """Return how fast it claims to be."""
        return self.plan.forecast

    def metadata(self, key: str) -> str | None:
        """Return nothing: there is no file."""
        return None

    def check_tokens(self, what: str, tokens: Iterable[int]) -> None:
        pass

    def token_bytes(self, token: int) -> bytes:
        """Return the letter of a token."""
        return chr(token).encode()


def main() -> None:
    """Serve until the end of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("name")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("--plain", action="store_true", help="without a chat template")
    given = parser.parse_args()
    model: Any = RepeatingModel(given.name, not given.plain)
    service = Service(open_catalogue(model), Admission(4), version="0")
    with bind("127.0.0.1", given.port) as bound:
        app: Any = make_app(service, access_for("127.0.0.1", "127.0.0.1", keys=given.key))
        print(f"serving {given.name} at http://127.0.0.1:{bound.getsockname()[1]}", file=sys.stderr, flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off")).run(sockets=[bound])


if __name__ == "__main__":
    main()
