"""What is said with every answer, and what a client is told that needs no model."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from edge_run.runtime.server.access import access_for
from edge_run.runtime.server.app import make_app
from edge_run.runtime.server.bodies import BodyRoom

pytestmark = pytest.mark.anyio

SITE = "https://chat.example"
OPEN: dict[str, Any] = {
    "admission": SimpleNamespace(is_closed=False),
    "catalogue": SimpleNamespace(is_usable=True),
}


def client(**parts: Any) -> httpx.AsyncClient:
    """Return a client of a server whose service has these parts, and that lets in the pages of SITE."""
    service: Any = SimpleNamespace(**parts)
    app: Any = make_app(service, access_for("localhost", "127.0.0.1", (), (SITE,)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8080")


async def test_every_answer_has_an_id_of_its_own_which_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    http = client(**OPEN)
    with caplog.at_level(logging.INFO, "edge_run.runtime.server.app"):
        answers = [await http.get(path) for path in ("/health", "/health", "/nowhere")]
    assert [answer.status_code for answer in answers] == [200, 200, 404]
    found = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(found)) == 3
    assert found == [answer.headers["request-id"] for answer in answers]
    assert all(one in caplog.text for one in found)


async def test_an_error_of_anthropics_has_the_id_of_its_request() -> None:
    refused = await client().get("/v1/messages")
    assert refused.json()["request_id"] == refused.headers["request-id"]


async def test_who_asks_with_a_wrong_method_is_told_the_right_ones() -> None:
    http = client()
    for answer, methods in ((await http.get("/v1/messages"), "POST"), (await http.post("/health"), "GET, HEAD")):
        assert answer.status_code == 405
        assert sorted(answer.headers["allow"].split(", ")) == methods.split(", ")


async def test_a_path_with_a_slash_at_its_end_is_none() -> None:
    """A redirection would lead to HTTP where a proxy before the server speaks HTTPS."""
    http = client(**OPEN)
    for answer in (await http.post("/v1/chat/completions/", json={}), await http.get("/health/")):
        assert (answer.status_code, "location" in answer.headers) == (404, False)


async def test_a_page_of_another_site_may_read_when_to_ask_again_and_which_request_it_was() -> None:
    http = client(**OPEN)
    answer = await http.get("/health", headers={"origin": SITE})
    readable = answer.headers["access-control-expose-headers"].split(", ")
    assert set(readable) == {"retry-after", "x-should-retry", "x-request-id", "request-id"}
    assert "access-control-expose-headers" not in (await http.get("/health")).headers


@pytest.mark.parametrize(
    ("n_running", "n_waiting", "status"), [(1, 0, 200), (2, 0, 503), (0, 2, 503), (1, 1, 503), (0, 1, 200)]
)
async def test_who_wants_a_free_slot_is_told_where_there_is_none(n_running: int, n_waiting: int, status: int) -> None:
    """One whose prompt is read has a slot too, and has no token yet."""
    served = SimpleNamespace(model=SimpleNamespace(context_tokens=8, most_parallel=2))

    async def look(request: Any) -> Any:
        return served

    http = client(look=look, admission=SimpleNamespace(n_running=n_running, n_waiting=n_waiting))
    assert (await http.get("/slots")).status_code == 200
    assert (await http.get("/slots?fail_on_no_slot=1")).status_code == status


@pytest.mark.parametrize(("template", "thinks"), [("<think>", True), ("<|channel|>", True), ("user:", False)])
async def test_whether_a_model_thinks_is_seen_by_its_template(template: str, thinks: bool) -> None:
    entry = SimpleNamespace(
        chat_template=template, architecture="any", trained_context_tokens=8, makes_embeddings=False, size_label="1B"
    )
    catalogue = SimpleNamespace(asked=lambda name: entry, open=None)
    shown = await client(catalogue=catalogue, read=BodyRoom().read).post("/api/show", json={"model": "any"})
    assert ("thinking" in shown.json()["capabilities"]) == thinks


async def test_its_health_says_whether_requests_are_taken_and_have_an_answer_before_long() -> None:
    ends, opens = {"admission": SimpleNamespace(is_closed=True)}, {"catalogue": SimpleNamespace(is_usable=False)}
    for parts, found in (
        ({}, (200, "ok")),
        (ends, (503, "shutting down")),
        (opens, (503, "loading model")),
    ):
        answer = await client(**{**OPEN, **parts}).get("/health")
        assert (answer.status_code, answer.json()["status"]) == found
