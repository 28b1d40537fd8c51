"""So many clients at a time for so long: what a server makes of it."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_run.base.bench import LoadSpread, ServerLoad
from edge_run.base.errors import EdgeRunError, system_errors
from edge_run.runtime.client.connection import ServerAddress, ServerClient

PATH = "/v1/completions"
RETRY_S = 1.0  # after an error, lest a server that refuses is asked without end
MOST_ERRORS_KEPT = 5
WORDS = ("river", "stone", "lamp", "winter", "garden", "letter", "copper", "seven", "bridge", "quiet", "engine", "salt")


@dataclass(frozen=True, slots=True)
class LoadTask:
    """What is asked for. model: its name; empty for the one that is there. clients: at a time."""

    clients: int
    seconds: float
    prompt_words: int
    max_tokens: int
    model: str = ""


@dataclass(slots=True)
class Tally:
    """What one client saw."""

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def run_load(address: ServerAddress, task: LoadTask, on_second: Callable[[int], None]) -> ServerLoad:
    """Put a load on a server; return what came of it.

    on_second: called about once a second with the seconds that have passed. Answers that the end cuts off count with
    the tokens that they have by then. Raises ConfigError or ProtocolError at once where the server cannot be reached,
    and TierReadError where the system refuses a thread for each client.
    """
    ServerClient(address).reach()
    tallies = [Tally() for _ in range(task.clients)]
    is_over = threading.Event()
    began_s = time.monotonic()
    threads = [
        threading.Thread(target=_ask_all, args=(address, task, tally, is_over), name=f"edge-run-load-{number}")
        for number, tally in enumerate(tallies)
    ]
    try:
        with system_errors("starting the clients"):
            for thread in threads:
                thread.daemon = True  # one that a server lets wait must not keep the process
                thread.start()
        while (passed_s := time.monotonic() - began_s) < task.seconds:
            on_second(int(passed_s))
            time.sleep(min(1.0, task.seconds - passed_s))
    finally:
        is_over.set()
    took_s = time.monotonic() - began_s
    return summed(str(address), task, tallies, took_s)


def _ask_all(address: ServerAddress, task: LoadTask, tally: Tally, is_over: threading.Event) -> None:
    chance = random.Random()  # no seed: a server may hold the prompts of an earlier run still
    while not is_over.is_set():
        try:
            _ask(ServerClient(address), task, tally, is_over, chance)
        except EdgeRunError as error:
            if not is_over.is_set():
                tally.errors[str(error)] += 1
            is_over.wait(RETRY_S)


def _ask(client: ServerClient, task: LoadTask, tally: Tally, is_over: threading.Event, chance: random.Random) -> None:
    """Have one answer made; its beginning is nobody else's, so that none is read for another."""
    prompt = " ".join([f"{chance.randrange(10**6)}", *chance.choices(WORDS, k=task.prompt_words)])
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": task.max_tokens, "stream_options": {"include_usage": True}}
    if task.model:
        body["model"] = task.model
    began_s = last_s = time.monotonic()
    n_pieces = 0
    events = client.answer(PATH, body)
    for event in events:
        if is_over.is_set():
            events.close()
            return
        now_s = time.monotonic()
        tally.prompt_tokens += event.prompt_tokens
        if event.completion_tokens:
            tally.tokens += event.completion_tokens - n_pieces
        if event.text:
            (tally.gaps_s if n_pieces else tally.first_s).append(now_s - last_s)
            n_pieces += 1
            tally.tokens += 1
            last_s = now_s
    tally.answers += 1
    tally.answer_s.append(time.monotonic() - began_s)


def summed(server: str, task: LoadTask, tallies: Sequence[Tally], took_s: float) -> ServerLoad:
    """Return what all clients saw together."""
    errors = sum((tally.errors.copy() for tally in tallies), Counter[str]())  # some may still be counting
    n_tokens = sum(tally.tokens for tally in tallies)
    return ServerLoad(
        server,
        task.model,
        task.clients,
        took_s,
        sum(tally.answers for tally in tallies),
        sum(errors.values()),
        tuple(text for text, _ in errors.most_common(MOST_ERRORS_KEPT)),
        sum(tally.prompt_tokens for tally in tallies),
        n_tokens,
        n_tokens / took_s,
        spread_of([value for tally in tallies for value in tally.first_s]),
        spread_of([value for tally in tallies for value in tally.gaps_s]),
        spread_of([value for tally in tallies for value in tally.answer_s]),
    )


def spread_of(values: Sequence[float]) -> LoadSpread | None:
    """Return median, p90 and p99 of values; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    median, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
    return LoadSpread(median, p90, p99)
