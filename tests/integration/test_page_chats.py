"""Chats that are deleted on the page: the room that comes of it, and where the focus goes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from browser_page import BROWSER, DRIVER, Page, chromium
from page_double import COUNT
from served import Served, served

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
CHATS = "Object.values(localStorage).map((text) => JSON.parse(text))"
KEPT = f"{CHATS}.map((one) => one.messages[0].content)"
FOCUSED = "return document.activeElement.id"

pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium, or no chromedriver"),
    pytest.mark.skipif(not find_spec("selenium"), reason="no selenium"),
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Served]]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver, served(Path("a-model"), program=DOUBLE) as server:
        yield Page(driver), server


@pytest.fixture
def page(rig: tuple[Page, Served]) -> Iterator[Page]:
    page, server = rig
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


def test_a_chat_that_is_deleted_while_another_one_is_answered(page: Page) -> None:
    page.say("hello")
    page.finished()
    page.one("#new").click()
    page.say(COUNT)
    page.sees("article:last-child .text", "0 1")
    page.until(f"{CHATS}.length === 2")
    page.one("#list li:last-child button").click()
    page.sees("article:last-child .text", "hello")
    for _ in range(2):
        page.js("document.querySelector('#list [aria-current] + .remove').click()")
    page.sees("article:last-child .text", "0 1")
    assert "Press again" in page.text("#said")
    assert "Cut off" not in page.text("article:last-child")
    page.one("#stop").click()
    page.finished()
    page.sees("article:last-child .state", "Stopped")
    page.until(f"{CHATS}.length === 1")


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
