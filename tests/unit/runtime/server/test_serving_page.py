"""docs/serving.md has every path of the server in its table of paths, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.runtime.server.access import access_for
from edge_run.runtime.server.app import make_app

PAGE = Path(__file__).parents[4] / "docs" / "serving.md"
WITHOUT_V1 = "also without `/v1`"  # said of a row, whose paths are two each
_CODE = re.compile(r"`(?:(GET|POST) )?(/[^`]*)`")


def paths_of(table: str) -> set[tuple[str, str]]:
    """Return the methods and paths of a table's first cells. A path without a method has that of the one before it."""
    found = set()
    for line in table.splitlines():
        method = ""
        for given, path in _CODE.findall(line.split("|")[1]):
            method = given or method
            found.add((method, path))
            if WITHOUT_V1 in line:
                found.add((method, path.removeprefix("/v1")))
    return found


def of_the_page() -> set[tuple[str, str]]:
    """Return what the page says."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"^### Paths\n+((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, "there is no table under the heading Paths"
    return paths_of(found[1])


def of_the_server() -> set[tuple[str, str]]:
    """Return what the server answers at, written as the page writes it."""
    service: Any = SimpleNamespace()
    guard: Any = make_app(service, access_for("localhost", "127.0.0.1"), has_metrics=True)
    return {
        (method, re.sub(r"^/page/.*", "/page/*", re.sub(r"\{\w+:path\}", "NAME", route.path)))
        for route in guard._app.routes
        for method in route.methods - {"HEAD"}  # which comes with GET
    }


@pytest.mark.parametrize(
    ("row", "paths"),
    [
        ("| `GET /`, `/page/*` | no `/key` |", {("GET", "/"), ("GET", "/page/*")}),
        ("| `POST /a`, `/b`, `GET /c` | `x` |", {("POST", "/a"), ("POST", "/b"), ("GET", "/c")}),
        ("| `POST /v1/a` | also without `/v1` |", {("POST", "/v1/a"), ("POST", "/a")}),
        ("| path | what it is |", set()),
    ],
)
def test_rows_are_read(row: str, paths: set[tuple[str, str]]) -> None:
    assert paths_of(row) == paths


def test_the_table_has_every_path() -> None:
    assert of_the_server() - of_the_page() == set()


def test_the_table_has_no_other_path() -> None:
    assert of_the_page() - of_the_server() == set()
