"""The page at `/`, in a real Chromium: what a user sees, does, and is told when something ends in the middle."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from browser_page import BROWSER, DRIVER, Page, chromium, other_tab
from kit_models import KIT
from mosquitto import free_port
from page_double import COUNT, LOSE, THINK, WAIT
from served import TEMPLATE, Served, served

DOUBLE = (str(Path(__file__).parents[1] / "page_double.py"),)
HOSTILE = (
    "<script>window.hit=1</script> <img/src=x/onerror=window.hit=2> [click](javascript:window.hit=3) "
    "[data](data:text/html,<script>window.hit=4</script>) ![picture](https://example.org/p.png) "
    "**<b>bold</b>** `<i>code</i>`"
)
MARKDOWN = """# Title

A *small* **text** with `code` and a [link](https://example.org/a).

- one
- two
  1. deep

| a | b |
|---|--:|
| 1 | 22 |

```python
print("<b>")
```

> said"""

DRAWN = """
    const [text, done] = arguments, place = document.createElement("div");
    const drawn = import("/page/markdown.js").then((markdown) => markdown.show(place, text));
    drawn.then(() => done(place.{}), done);
"""

CHATS = "Object.values(localStorage).map((text) => JSON.parse(text))"

pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium, or no chromedriver"),
    pytest.mark.skipif(not find_spec("selenium"), reason="no selenium"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture(scope="module")
def double() -> Iterator[Served]:
    with served(Path("a-model"), program=DOUBLE) as server:
        yield server


@pytest.fixture
def page(driver: Any, double: Served) -> Iterator[Page]:
    """The page of the made-up model; a test that ends must have left no error in the console."""
    page = Page(driver)
    page.open(double)
    yield page
    assert not page.errors()


def test_a_chat_with_a_real_model(driver: Any, kit: Path) -> None:
    page = Page(driver)
    with served(kit, "-c", 512, "-t", 1, "-n", 24, "--chat-template", TEMPLATE) as server:
        page.open(server)
        page.sees("#model", kit.stem)
        page.say("Tell me of the fox.")
        page.finished()
        assert page.text("article:last-child .text")
        page.sees("article:last-child .figures", "tokens")
        page.sees("#machine", "Weights that stay")
        page.sees("#machine", "nothing: all is in memory")
        assert not page.errors()


def test_what_a_model_says_is_text_whatever_it_says(page: Page) -> None:
    page.say(HOSTILE)
    page.finished()
    answer = page.text("article:last-child .text")
    for part in ("<script>window.hit=1</script>", "onerror=window.hit=2", "javascript:window.hit=3", "<i>code</i>"):
        assert part in answer
    inside = "return [...document.querySelectorAll('article:last-child .text ' + arguments[0])].length"
    assert not page.js(inside, "script") + page.js(inside, "img") + page.js(inside, "b") + page.js(inside, "i")
    links = page.js(
        "return [...document.querySelectorAll('article .text a')].map((a) => [a.protocol, a.rel, a.target])"
    )
    assert links == [["https:", "noopener noreferrer", "_blank"]]
    assert not page.js("return window.hit ?? 0")


def test_markdown(page: Page) -> None:
    page.say(MARKDOWN)
    page.finished()
    shape = "return [...document.querySelector('article:last-child > .text').children].map((one) => one.tagName)"
    assert page.js(shape) == ["H3", "P", "UL", "DIV", "FIGURE", "BLOCKQUOTE"]
    assert page.text("article:last-child ul ol li") == "deep"
    assert page.text("article:last-child td.end") == "22"
    assert page.text("article:last-child pre") == 'print("<b>")'
    assert page.text("article:last-child blockquote") == "said"
    page.say(THINK)
    page.finished()
    assert [one.is_displayed() for one in page.driver.find_elements("css selector", ".again")] == [False, True]
    assert page.js("return document.querySelector('article:last-child .thoughts .text').textContent") == "What was it?"
    assert page.text("article:last-child > .text") == "It was a thought."


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("[here](https://evil.example)", "here (evil.example)"),
        ("[https://a.example/?evil.example](https://evil.example/)", "https://a.example/?evil.example (evil.example)"),
        ("https://bank.example@evil.example", "https://bank.example@evil.example (evil.example)"),
        ("[bank.example](https://bank.example@evil.example)", "bank.example (evil.example)"),
        ("[evil.example](https://evil.example/)", "evil.example"),
        ("https://evil.example/a", "https://evil.example/a"),
        ("[me@box.example](mailto:me@box.example)", "me@box.example"),
    ],
)  # fmt: skip
def test_a_link_says_where_it_leads(page: Page, text: str, drawn: str) -> None:
    assert page.driver.execute_async_script(DRAWN.format("textContent"), text) == drawn


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("a | b\n---\nThe end.", "<p>a | b</p><hr><p>The end.</p>"),
        ("> a | b\n> --", "<blockquote><p>a | b<br>--</p></blockquote>"),
        ("|a\\|b|\n|-|", "<tr><th>a|b</th></tr></thead>"),
        ("|a|\n-\n|1|", "<tr><th>a</th></tr></thead><tbody><tr><td>1</td></tr></tbody>"),
    ],
)
def test_what_is_no_table_is_text(page: Page, text: str, drawn: str) -> None:
    assert drawn in page.driver.execute_async_script(DRAWN.format("innerHTML"), text)


def test_no_answer_stops_the_page(page: Page) -> None:
    page.js("window.can = URL.canParse; URL.canParse = null")
    assert page.driver.execute_async_script(DRAWN.format("innerHTML"), "http://a.b\n\nc") == "<p>http://a.b</p><p>c</p>"
    page.js("URL.canParse = window.can")
    page.say("a | b\n---\nThe end.")
    page.finished()
    page.driver.refresh()
    page.sees("#machine", "Weights that stay")
    page.sees("#list", "a | b")
    assert page.text("article:last-child .text").endswith("The end.")


@pytest.mark.parametrize(
    "text",
    ["*a " * 20_000, "**a `c` [d](http://e.f) " * 10_000, "> " * 20_000 + "x", "[" * 60_000],
    ids=["stars", "marks", "quotes", "brackets"],
)
def test_a_text_that_is_nothing_but_marks_is_drawn(page: Page, text: str) -> None:
    """Neither recursion nor a search that begins anew at each of them holds the page up."""
    assert page.driver.execute_async_script(DRAWN.format("textContent.length"), text) > len(text) / 4


def test_stop_and_answer_anew(page: Page, double: Served) -> None:
    page.say(COUNT)
    page.sees("article:last-child .text", "3")
    page.one("#text").send_keys("\ue00c")
    page.sees("article:last-child .state", "Stopped")
    double.wait_until(running=0, waiting=0)
    page.one("article:last-child .again").click()
    page.sees("article:last-child .text", "0 1")
    page.one("#stop").click()
    page.sees("article:last-child .state", "Stopped")
    assert page.js("return document.querySelectorAll('article').length") == 2
    assert page.js("return document.activeElement.id") == "text"


def test_a_reload_before_another_answer_begins_leaves_the_one_that_was_there(page: Page) -> None:
    page.say("hello")
    page.finished()
    page.js("window.fetch = () => new Promise(() => {})")
    page.one("article:last-child .again").click()
    page.driver.refresh()
    assert page.text("article:last-child .text") == "hello"


def test_keys_of_an_input_method_are_not_the_pages(page: Page) -> None:
    press = "document.querySelector('#text').dispatchEvent(new KeyboardEvent('keydown', {bubbles: true, %s}))"
    page.say(COUNT)
    page.sees("article:last-child .text", "0 1")
    page.js(press % "key: 'Escape', isComposing: true")
    assert page.one("#stop").is_displayed(), "Escape leaves a candidate"
    page.one("#stop").click()
    page.sees("article:last-child .state", "Stopped")
    page.js("document.querySelector('#text').value = 'ka'")
    page.js(press % "key: 'Enter', keyCode: 229")
    assert page.js("return document.querySelectorAll('article').length") == 2, "Enter takes one"


def test_the_focus_stays_on_a_button(page: Page) -> None:
    """The page asks the server once a second, and draws what changed."""
    page.say(COUNT)
    page.sees("article:last-child .text", "0 1")
    page.js("document.getElementById('stop').focus(); window.was = performance.now()")
    page.until("performance.now() - window.was > 2200")
    assert page.js("return document.activeElement.id") == "stop"
    page.one("#stop").click()
    page.finished()


def test_what_got_no_answer_is_not_said_again(page: Page, double: Served) -> None:
    page.say(WAIT)
    double.wait_until(running=0, waiting=1)
    page.one("#stop").click()
    page.sees("article:last-child .state", "Stopped")
    page.say("what I meant")
    page.finished()
    assert page.text("article:last-child .text") == "what I meant", "the roles alternate, as the template wants"


def test_two_tabs_with_one_conversation_lose_nothing(page: Page, double: Served) -> None:
    page.say(COUNT)
    page.sees("article:last-child .text", "0 1 2")
    with other_tab(page, double):
        page.sees("article:last-child .text", "0 1 2")
        page.say("meanwhile")
        page.finished()
    page.until(f"{CHATS}.length === 2")
    page.one("#stop").click()
    page.sees("article:last-child .state", "Stopped")
    said = page.js(f"return {CHATS}.map((one) => one.messages.filter(({{ role }}) => role === 'user').length)")
    assert sorted(said) == [1, 2]
    assert page.js("return document.querySelectorAll('#list li').length") == 2


def test_a_chat_that_another_tab_deletes_stays_so(page: Page, double: Served) -> None:
    page.say(COUNT)
    page.sees("article:last-child .text", "0 1 2")
    with other_tab(page, double):
        page.sees("article:last-child .text", "0 1 2")
        page.js("document.querySelector('#list [aria-current] + button').click()")
        said = int(page.text("article:last-child .text").split()[-1])
        page.sees("article:last-child .text", f" {said + 30} ")  # was kept and drawn anew meanwhile
        page.js("document.querySelector('#list [aria-current] + button').click()")
        page.until(f"{CHATS}.length === 0")
    said = int(page.text("article:last-child .text").split()[-1])
    page.sees("article:last-child .text", f" {said + 30} ")  # it was to be kept meanwhile
    page.one("#stop").click()
    page.sees("article:last-child .state", "Stopped")
    assert page.js(f"return {CHATS}.length") == 0


def test_a_reload_in_mid_answer_keeps_what_was_said(page: Page, double: Served) -> None:
    page.say(COUNT)
    page.sees("article:last-child .text", "0 1 2 3")
    page.driver.refresh()
    page.sees("article:last-child .state", "Cut off")
    assert page.text("article:last-child .text").startswith("0 1 2 3")
    double.wait_until(running=0, waiting=0)
    page.say("go on")
    page.finished()
    assert page.text("article:last-child .text") == "go on"


def test_conversations_settings_and_lines(page: Page) -> None:
    page.one("#text").send_keys("first", "\ue008\ue007\ue000", "line two", "\ue007")
    page.finished()
    assert page.text("article:last-child .text") == "first\nline two"
    page.one("#new").click()
    page.one("#show-settings").click()
    page.one("#system").send_keys("Be brief.")
    page.one("#temperature").send_keys("0.5")
    page.one("#settings [type=submit]").click()
    page.say("second")
    page.finished()
    assert page.text("article:last-child .text") == "Be brief. second"
    assert sorted(page.js(f"return {CHATS}.map((one) => one.settings.temperature)"), key=str) == [0.5, None]
    page.js(
        "[...document.querySelectorAll('#list li button:first-child')].find((b) => b.innerText === 'first').click()"
    )
    page.sees("article:last-child .text", "line two")
    page.js("document.querySelector('#list [aria-current] + button').click()")
    page.js("document.querySelector('#list [aria-current] + button').click()")
    page.until("document.querySelectorAll('#list li').length === 1")


def test_a_server_that_fails_in_mid_answer_and_comes_back(driver: Any) -> None:
    page = Page(driver)
    port = free_port()
    with served(Path("a-model"), "--port", port, program=DOUBLE) as server:
        page.open(server)
        page.say(COUNT)
        page.sees("article:last-child .text", "0 1 2")
        server.process.kill()
        page.sees("article:last-child .state", "went away")
        page.sees("#notice", "does not answer")
        page.js("document.querySelector('.again').click()")
        assert page.text("article:last-child .text").startswith("0 1 2")
    with served(Path("a-model"), "--port", port, program=DOUBLE):
        page.until("document.getElementById('notice').hidden")
        page.say("are you back")
        page.finished()
        assert page.text("article:last-child .text") == "are you back"
    assert not [error for error in page.errors() if "ERR_" not in error], "nothing but the connection that was lost"


def test_a_key_is_asked_for_and_a_model_without_a_template_continues(driver: Any) -> None:
    page = Page(driver)
    with served(Path("a-model"), "--key", "a-key-of-eight", "--plain", program=DOUBLE) as server:
        page.open(server)
        for key in ("ключ-ключ", "not-this-one", "a-key-of-eight"):
            page.until("document.getElementById('key').open")
            page.one("#key-text").send_keys(key, "\ue007")
            if key == "ключ-ключ":
                page.sees("#key-why", "of ASCII only")
        page.sees("#model", "a-model")
        page.sees(".about", "no chat template")
        page.say(WAIT)
        page.until("!document.getElementById('stop').hidden")
        page.one("#stop").click()
        page.sees("article:last-child .state", "Stopped")
        page.say("hello")
        page.finished()
        page.say(" again")
        page.finished()
        assert page.text("article:last-child .text") == "hellohello again"
        page.say(" and" * 30)
        page.finished()
        assert page.text("article:last-child .text").count("and") == 30, "not 16 tokens, as the API has it"
        assert "eight" not in page.js("return JSON.stringify(localStorage)")
        assert page.js("return sessionStorage.getItem('edge-run/key')") == "a-key-of-eight"
    page.errors()


def test_the_machine_and_a_device_that_is_lost(page: Page) -> None:
    page.sees("#machine", "layers 20\u201327")
    for part in ("of 2.00 GiB", "of these lent to weights", "MB/s", "65 % of 120", "0 of 4", "other numerics"):
        page.sees("#machine", part)
    page.say(LOSE)
    page.sees("#machine", "has no layers any more")
    page.sees("#machine", "layers 12\u201327")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_small_screen(page: Page, scheme: str) -> None:
    page.look(360, 640, scheme)
    page.say(MARKDOWN + " " + "long" * 40)
    page.finished()
    assert page.js(
        "return document.documentElement.scrollWidth <= 360 && document.getElementById('log').scrollWidth <= 360"
    )
    paper = page.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert paper < 80 if scheme == "dark" else paper > 200
    page.one("#show-machine").click()
    page.sees("#machine", "Weights that stay")
    assert page.js("return document.documentElement.scrollWidth <= 360")
    page.one("#show-machine").send_keys("\ue00c")
    assert not page.one("#machine").is_displayed()


def test_nothing_leaves_the_machine(page: Page, double: Served) -> None:
    page.sees("#machine", "Weights that stay")
    places = page.js("return performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)")
    assert places
    assert set(places) == {double.url}


def test_models_to_choose_from(driver: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        shutil.copy(KIT, tmp_path / f"{name}.gguf")
    page = Page(driver)
    with served(None, "--models", tmp_path, "-c", 512, "-t", 1, "-n", 8) as server:
        page.open(server)
        page.sees("#mode", "no model is open")
        page.until("document.getElementById('models').options.length === 2")
        page.js(
            "const list = document.getElementById('models'); list.value = 'second'; "
            "list.dispatchEvent(new Event('change'))"
        )
        page.say("Once upon a time")
        page.finished()
        page.sees("#mode", "all in memory")
        page.until("document.title === 'second · edge-run'")
        page.sees("#machine", "Weights that stay")
        assert not page.errors()
