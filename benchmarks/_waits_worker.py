"""Answers that come and go while others are made, in one process, for `waits.py`. Prints JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_run import AsyncModel
from edge_run.base.units import parse_size
from edge_run.devices.host.memory import process_memory

SHORT_PROMPT, SHORT_TOKENS = 64, 16
LONG_PROMPT = 2000
STEADY_TOKENS = 8  # of each answer, before anything is measured
DECODING = 8  # answers that a long prompt comes beside
SHORT = 15  # short answers beside a long one
FLOOD, OTHER_KEYS, OF_EACH = 24, 3, 4


@dataclass
class Asked:
    """One answer. moments: when each of its tokens came; asked_s, ended_s: by `time.monotonic`; key: who asked."""

    key: str
    asked_s: float
    ended_s: float = 0.0
    moments: list[float] = field(default_factory=list)

    @property
    def took_s(self) -> float:
        """From the question to the last token."""
        return self.ended_s - self.asked_s

    def gaps_s(self, after_s: float, until_s: float) -> list[float]:
        """Return the times between its tokens within an interval."""
        inside = [moment for moment in self.moments if after_s <= moment <= until_s]
        return list(np.diff(inside))


class Asking:
    """Asks an open model, with pieces of a text that are never the same.

    asked: all answers so far.
    """

    def __init__(self, model: AsyncModel, text: list[int]) -> None:
        self._model, self._text, self._next = model, text, 0
        self.asked: list[Asked] = []

    async def ask(self, prompt: int, tokens: int, key: str = "", seen: Callable[[Asked], object] = id) -> Asked:
        """Have an answer of so many tokens made after a prompt of so many. seen: is told after each token."""
        start, self._next = self._next, self._next + prompt
        asked = Asked(key, time.monotonic())
        self.asked.append(asked)
        words = self._text[start : start + prompt]
        async for piece in self._model.generate(words, max_tokens=tokens, temperature=0, ignore_eos=True, key=key):
            if piece.token_ids:
                asked.moments.append(time.monotonic())
                seen(asked)
        asked.ended_s = time.monotonic()
        return asked


async def riding(asking: Asking) -> dict[str, Any]:
    """A long prompt comes while answers are made: how much longer their tokens take."""
    steady, ended = asyncio.Event(), asyncio.Event()

    def seen(_: Asked) -> None:
        if all(len(one.moments) >= 2 * STEADY_TOKENS for one in asking.asked):
            steady.set()

    tasks = [asyncio.create_task(asking.ask(SHORT_PROMPT, 400, seen=seen)) for _ in range(DECODING)]
    await steady.wait()
    began_s = time.monotonic()
    long = asyncio.create_task(asking.ask(LONG_PROMPT, 1, "long", seen=lambda _: ended.set()))
    await ended.wait()
    until_s = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(long, *tasks, return_exceptions=True)
    made = [one for one in asking.asked if not one.key]
    before = [gap for one in made for gap in one.gaps_s(one.moments[STEADY_TOKENS], began_s)]
    beside = [gap for one in made for gap in one.gaps_s(began_s, until_s)]
    return {
        "before_median_s": float(np.median(before)),
        "beside_median_s": float(np.median(beside)),
        "beside_p99_s": float(np.quantile(beside, 0.99)),
        "prompt_s": until_s - began_s,
        "slowdown": float(np.median(beside) / np.median(before)) - 1,
    }


async def beside_a_long_one(asking: Asking) -> dict[str, Any]:
    """Short answers, and the same beside a long one that came first: how long they take."""

    async def short() -> list[float]:
        made = await asyncio.gather(*(asking.ask(SHORT_PROMPT, SHORT_TOKENS) for _ in range(SHORT)))
        return sorted(one.took_s for one in made)

    alone = await short()
    long = asyncio.create_task(asking.ask(LONG_PROMPT, 200))
    await asyncio.sleep(0.5)
    beside = await short()
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    p99 = [float(np.quantile(times, 0.99)) for times in (alone, beside)]
    return {"alone_p99_s": p99[0], "beside_p99_s": p99[1], "ratio": p99[1] / p99[0]}


async def flood(asking: Asking) -> dict[str, Any]:
    """One key asks for everything at once, then others ask: what share they get until they are done."""
    tasks = [asyncio.create_task(asking.ask(SHORT_PROMPT, SHORT_TOKENS, "flood")) for _ in range(FLOOD)]
    await asyncio.sleep(0.5)
    keys = [f"other-{number}" for number in range(OTHER_KEYS)] * OF_EACH
    began_s = time.monotonic()
    others = await asyncio.gather(*(asking.ask(SHORT_PROMPT, SHORT_TOKENS, key) for key in keys))
    until_s = max(one.ended_s for one in others)
    flooding = await asyncio.gather(*tasks)
    of_flood = sum(began_s <= moment <= until_s for one in flooding for moment in one.moments)
    of_others = sum(len(one.moments) for one in others)
    return {"of_flood": of_flood, "of_others": of_others, "share_of_others": of_others / (of_others + of_flood)}


SCENES: dict[str, Callable[[Asking], Awaitable[dict[str, Any]]]] = {
    "riding": riding,
    "long": beside_a_long_one,
    "flood": flood,
}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one scene, and the pass that was predicted."""
    parallel = {"riding": DECODING + 1, "long": SHORT + 1, "flood": OTHER_KEYS + 1}[arguments.scene]
    most = 512 * parallel + 2 * LONG_PROMPT
    async with AsyncModel(
        arguments.model, memory=parse_size(arguments.memory), sequences=parallel, context_tokens=most
    ) as model:
        text = model._opened.tokenize(arguments.text.read_text("utf-8", "replace")[:400_000], add_special=False)
        forecast = model._opened.forecast()
        found = await SCENES[arguments.scene](Asking(model, text))
        predicted_s = forecast.parallel / forecast.parallel_tokens_per_s if forecast else 0.0
        return {**found, "predicted_pass_s": predicted_s, "peak_bytes": process_memory().peak_bytes}


def main() -> None:
    """Run one scene and print its figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--scene", choices=SCENES, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--memory", required=True)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
