"""The page's files: what a browser is told of each, how large they are, and that nothing in them leads elsewhere."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from edge_run.runtime.server.access import access_for
from edge_run.runtime.server.app import make_app
from edge_run.runtime.server.page_files import FOLDER, PAGE_FILES

pytestmark = pytest.mark.anyio

MOST_BYTES = 60_000
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
NAVIGATION = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.fixture
def http() -> httpx.AsyncClient:
    """A client of a server with a key, which the client does not have."""
    model = SimpleNamespace(embedding=None)
    service: Any = SimpleNamespace(admission=SimpleNamespace(is_closed=False), model=model)
    app: Any = make_app(service, access_for("localhost", "127.0.0.1", keys=["a-key-of-eight"]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8080")


def test_the_table_has_every_file() -> None:
    assert sorted(PAGE_FILES.values()) == sorted(path.name for path in FOLDER.iterdir())


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MOST_BYTES


@pytest.mark.parametrize("name", sorted(PAGE_FILES.values()))
def test_no_file_leads_elsewhere(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # a name, not a place
    assert not re.findall(
        r"""(?:https?:|wss?:|ftp:|url\(|["'(]//|@import)[^\s"'`)]{3,}""", text.replace("https?:\\/\\/", "")
    )


@pytest.mark.parametrize("name", [name for name in sorted(PAGE_FILES.values()) if name.endswith(".js")])
def test_no_script_makes_markup_or_code_of_text(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\b|new Function|srcdoc", text
    )


def test_the_document_has_no_script_or_style_within() -> None:
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"\sstyle=|<style|\son\w+=|<script(?![^>]*\ssrc=)", text)


@pytest.mark.parametrize("path", sorted(PAGE_FILES))
async def test_what_a_browser_is_told_of_a_file(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    assert answer.status_code == 200, "it needs no key"
    assert answer.content == (FOLDER / PAGE_FILES[path]).read_bytes()
    assert answer.headers["content-type"].startswith(KINDS[(FOLDER / PAGE_FILES[path]).suffix])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    again = await http.get(path, headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await http.post(path)).status_code == 405


async def test_what_the_page_may_do(http: httpx.AsyncClient) -> None:
    said = (await http.get("/")).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in said.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["trusted-types"] == "'none'"
    assert {rules[name] for name in rules if name.endswith("-src")} == {"'none'", "'self'"}
    assert "unsafe" not in said


async def test_only_what_the_table_names_is_open(http: httpx.AsyncClient) -> None:
    for path in ("/page/", "/page/index.html", "/page/..%2Fapp.py", "/page/../app.py", "/edge-run/status"):
        assert (await http.get(path)).status_code == 401, path


async def test_a_link_of_another_site_leads_to_the_page_and_to_nothing_else(http: httpx.AsyncClient) -> None:
    assert (await http.get("/", headers=NAVIGATION)).status_code == 200
    assert (await http.get("/", headers={**NAVIGATION, "sec-fetch-dest": "iframe"})).status_code == 403
    assert (
        await http.get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"})
    ).status_code == 403
    for path in ("/page/main.js", "/health", "/v1/models"):
        assert (await http.get(path, headers=NAVIGATION)).status_code == 403, path
    assert (await http.post("/", headers=NAVIGATION)).status_code == 403
