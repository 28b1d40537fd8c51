"""Chats that are deleted on the page: the room that comes of it, and where the focus goes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from browser_page import BROWSER, DRIVER, Page, chromium
from served import served

DOUBLE = (str(Path(__file__).parents[1] / "page_double.py"),)
ROOM_FOR_ONE = """
    const set = Storage.prototype.setItem;
    Storage.prototype.setItem = function (key, text) {
        if (this === localStorage && localStorage.length && localStorage.getItem(key) === null) {
            throw new DOMException("no room", "QuotaExceededError");
        }
        set.call(this, key, text);
    };
"""
KEPT = "Object.values(localStorage).map((text) => JSON.parse(text).messages[0].content)"
FOCUSED = "return document.activeElement.id"

pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium, or no chromedriver"),
    pytest.mark.skipif(not find_spec("selenium"), reason="no selenium"),
]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path / "browser") as driver, served(Path("a-model"), program=DOUBLE) as server:
        page = Page(driver)
        page.open(server)
        yield page
        assert not page.errors()


def delete(page: Page, which: str) -> None:
    for _ in range(2):
        page.js("const one = document.querySelector(arguments[0]); one.focus(); one.click()", which)


def test_what_had_no_room_is_kept_once_another_chat_is_deleted(page: Page) -> None:
    page.js(ROOM_FOR_ONE)
    page.say("first")
    page.finished()
    for deleted, left in (("li:last-child", "second"), ("li:first-child", "second")):
        page.one("#new").click()
        page.say("second" if deleted == "li:last-child" else "third")
        page.finished()
        page.sees("#notice", "storage is full")
        delete(page, f"#list {deleted} .remove")
        page.until("document.getElementById('notice').hidden")
        assert page.js(f"return {KEPT}") == [left]


@pytest.mark.parametrize(("width", "focused"), [(360, "show-conversations"), (1280, "new")])
def test_the_focus_stays_on_the_page_when_a_chat_is_deleted(page: Page, width: int, focused: str) -> None:
    page.look(width, 640)
    page.say("hello")
    page.finished()
    if width < 600:
        page.one("#show-conversations").click()
    delete(page, "#list .remove")
    page.until(f"{KEPT}.length === 0")
    assert page.js(FOCUSED) == focused
