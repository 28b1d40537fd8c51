"""The command line at a terminal: chats, and what is shown in colour."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from kit_models import GREEDY, KIT, PROMPT
from screens import Screen

pytestmark = pytest.mark.usefixtures("known_models")
Start = Callable[..., Screen]


def test_interrupt_stops_an_answer_and_keeps_the_chat(screen: Start) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    chat = screen(KIT, *GREEDY, "-c", "2048", "--chat-template", template, "-sys", "Be kind.")
    assert "all of it stays in memory" in chat.wait_for("> ")
    chat.type("A story, \\\nplease\n")
    chat.wait_for(r"please\n\n?[^>]{10}")
    chat.process.send_signal(signal.SIGINT)
    assert "Stopped." in chat.wait_for(r"tokens/s[^>]*\n> ")
    chat.type("/stats\n")
    assert re.search(r"1 answer, \d+ tokens", chat.wait_for(r"opened in .*\n> "))
    chat.type("/clear\n")
    chat.wait_for("empty again.*\n> ")
    chat.wait_asleep()  # Python does not see a signal between the prompt and the wait for a key
    chat.process.send_signal(signal.SIGINT)
    chat.wait_for("Ctrl-C again or Ctrl-D leaves.\n> ")
    chat.type("\x04")
    assert chat.end() == 0
    assert "Traceback" not in chat.text


def test_full_context_does_not_end_the_chat(screen: Start) -> None:
    chat = screen(KIT, "--temp", 0, "-c", 256, "-ub", 64)
    chat.wait_for("> ")
    chat.type(f"{PROMPT} " * 30 + "\n")
    assert "the answer ends here; /clear begins anew" in chat.wait_for("\n> ")
    chat.type("and\n")
    assert "the context holds 256" in chat.wait_for("\n> ")
    chat.type("/clear\n")
    chat.wait_for("\n> ")
    chat.type("/exit\n")
    assert chat.end() == 0


def test_a_chat_leaves_out_its_oldest_turns_when_asked_to(screen: Start, run: Any) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    chat = screen(KIT, *GREEDY, "-c", 256, "-ub", 64, "-n", 8, "--chat-template", template, "-sys", "Be.")
    chat.wait_for("> ")
    chat.type("/drop\n")
    assert "no turn that could be left out" in chat.wait_for("\n> ")
    for _ in range(2):
        chat.type(f"{PROMPT} " * 4 + "\n")
        chat.wait_for("tokens/s[^>]*\n> ")
    chat.type(f"{PROMPT} " * 22 + "\n")
    assert "/drop leaves out its oldest turns, /clear begins anew" in " ".join(chat.wait_for("\n> ").split())
    chat.type("/drop\n")
    said = " ".join(chat.wait_for("tokens/s[^>]*\n> ").split())
    kept = re.search(r"4 messages left out, the rest is read anew; (\S+) has them all\.", said)
    assert kept
    chat.type("/exit\n")
    assert chat.end() == 0
    whole = run("sessions", "show", kept[1]).stdout
    assert whole.count(PROMPT) == 8


def test_no_colour_and_no_control_codes_where_they_are_not_wanted(screen: Start) -> None:
    once = screen(KIT, "-p", PROMPT, "-n", 4, *GREEDY)
    assert once.end() == 0
    assert "\x1b" not in once.text
    coloured = screen(KIT, "-p", PROMPT, "-n", 4, *GREEDY, TERM="xterm", COLUMNS="20")
    assert coloured.end() == 0
    assert "\r\x1b[2K" in coloured.text
