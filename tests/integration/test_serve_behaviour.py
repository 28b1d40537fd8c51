"""`edge-run serve` while clients wait, go away, are too many, or the server ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_run.base.units import MIB
from served import Served, served, wait_for

PROMPT = "Once upon a time"
LONG = {"prompt": PROMPT, "max_tokens": 100_000, "stream": True}
SHORT = {"prompt": PROMPT, "max_tokens": 2}


@pytest.fixture(scope="module")
def server(grown: Path) -> Iterator[Served]:
    """A model that streams, whose answers would take minutes."""
    with served(
        grown, "-c", 16_384, "-t", 1, "-ub", 16, "--memory", 190 * MIB, "--parallel", 1, "--max-queue", 1
    ) as server:
        yield server


def events(response: httpx.Response) -> Iterator[str]:
    """Return the data of the events of a stream, as they come."""
    return (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))


def post(server: Served, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_a_client_that_goes_away_ends_its_answer_and_what_it_computed_stays(server: Served) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
        found = events(response)  # which would close the response when it is forgotten
        next(found)
        assert server.requests() == (1, 0)
    server.wait_until(running=0, waiting=0)
    found = post(server, SHORT).json()
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_client_that_goes_away_while_its_prompt_is_read(server: Served) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**LONG, "prompt": "a fox and " * 1500}, timeout=60
    ) as response:
        assert response.status_code == 200, "the headers come at once"
        assert server.requests() == (0, 1)
    server.wait_until(running=0, waiting=0)
    assert post(server, SHORT).status_code == 200


def test_a_client_that_waits_for_a_whole_answer_and_goes_away(server: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**LONG, "stream": False}, timeout=0.5)
    server.wait_until(running=0, waiting=0)


def test_too_many_are_told_when_to_come_again(server: Served) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
        found = events(response)  # which would close the response when it is forgotten
        next(found)
        waiting = [threading.Thread(target=post, args=(server, SHORT)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        server.wait_until(running=1, waiting=2)
        refused = post(server, SHORT)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.get("/health").status_code == 200
    for thread in waiting:
        thread.join(60)
    assert post(server, SHORT).status_code == 200


def test_all_that_kept_the_budget(server: Served) -> None:
    assert post(server, SHORT).status_code == 200
    memory = server.get("/edge-run/status").json()["memory"]
    assert memory["window_bytes"] > 0, "weights stream"
    assert memory["peak_bytes"] <= memory["budget_bytes"]


def test_answers_share_passes_and_one_that_leaves_does_not_stop_the_others(kit: Path) -> None:
    with served(kit, "-c", 8192, "-t", 1, "--parallel", 3) as server, contextlib.ExitStack() as leaving:
        endless = {**LONG, "temperature": 0, "max_tokens": 1500, "ignore_eos": True}  # so long that all of them begin
        streams = [
            leaving.enter_context(httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60))
            for body in (endless, endless, {**endless, "max_tokens": 300})
        ]
        left, going_on, ending = (events(stream) for stream in streams)
        for one in (left, going_on, ending):
            next(one)
        assert server.requests() == (3, 0)
        streams[0].close()
        wait_for(server.aborted)
        assert [*ending][-1] == "[DONE]"
        assert "[DONE]" not in itertools.islice(going_on, 200), "it goes on"


def test_exact_answers_at_once_have_a_part_of_the_context_each(kit: Path) -> None:
    with served(kit, "-c", 256, "-t", 1, "--parallel", 2, "--exact") as server:
        length = server.get("/v1/models").json()["data"][0]["meta"]["n_ctx"]
        assert length < 256
        fits = post(server, {"prompt": [1] * (length - 1), "max_tokens": 1})
        assert fits.status_code == 200, fits.text
        long = post(server, {"prompt": [1] * length, "max_tokens": 1})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_told_to_stop_it_lets_answers_finish(kit: Path) -> None:
    with served(kit, "-c", 2048, "-t", 1, "--drain", 60) as server:
        body = {**LONG, "max_tokens": 500}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            found = events(response)
            next(found)
            server.process.send_signal(signal.SIGTERM)
            assert [*found][-1] == "[DONE]"
        assert server.process.wait(60) == 0
        assert "stopping" in server.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_answers_after_a_while_and_says_so(kit: Path, number: int) -> None:
    with served(kit, "-c", 2048, "-t", 1, "--drain", 0.2) as server:
        body = {"prompt": PROMPT, "max_tokens": 1000, "n": 16, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            found = events(response)
            next(found)
            server.process.send_signal(number)
            *_, last, end = found
        assert end == "[DONE]"
        assert json.loads(last)["error"]["code"] == "shutting_down"
        assert server.process.wait(60) == 0


def test_without_requests_it_stops_at_once(kit: Path) -> None:
    with served(kit, "-c", 128, "-t", 1) as server:
        assert server.end() == 0
        assert server.said.count("\n") == 1
