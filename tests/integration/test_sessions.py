"""Conversations that survive: a chat is killed, and another process goes on with it."""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kit_models import KIT
from program import Program, assert_refused, begin, run_program

pytestmark = pytest.mark.usefixtures("known_models")
SETTINGS = ["-c", "1024", "-ub", "32", "-t", "1", "-n", "24", "--temp", "0"]
FIRST = "Once upon a time there was a fox who lived in a small house at the end of the wood. " * 14
SECOND = "The next day"


def run(environment: dict[str, str], *args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return run_program(*args, environment=environment, text=text)


def chat(environment: dict[str, str], *args: str, messages: Sequence[str]) -> str:
    done = run(environment, "chat", *args, *SETTINGS, text="".join(f"{message}\n" for message in messages))
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(environment: dict[str, str]) -> list[str]:
    lines = run(environment, "sessions", "list").stdout.splitlines()
    return [line.split()[0] for line in lines[1:-1]]


@pytest.mark.slow
def test_a_chat_that_is_killed_goes_on_after_its_last_answer(environment: dict[str, str], tmp_path: Path) -> None:
    wanted = chat({**environment, "HOME": str(tmp_path / "other")}, str(KIT), messages=[FIRST, SECOND]).splitlines()
    rng = random.Random(0)
    for delay_s in (0.0, rng.uniform(0, 0.3), rng.uniform(0, 1)):
        process = begin(
            Program(["chat", str(KIT), *SETTINGS]),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdin
            assert process.stderr
            print(FIRST, file=process.stdin, flush=True)
            while "tokens/s" not in process.stderr.readline():
                assert process.poll() is None
            print("A long story", file=process.stdin, flush=True)
            time.sleep(delay_s)
            process.kill()
        (name, *_) = names(environment)
        said = run(environment, "sessions", "show", name).stdout
        assert said.startswith(FIRST)
        if "A long story" not in said:  # the second answer was not complete: it is as if it had not been asked for
            assert chat(environment, "--continue", messages=[SECOND]).splitlines()[-1] == wanted[-1]
            assert SECOND in run(environment, "sessions", "show", name).stdout
        assert run(environment, "sessions", "rm", name).returncode == 0
    assert names(environment) == []
    assert not [path for path in (tmp_path / "home" / ".cache").rglob("*.json") if path.parent.name == "conversations"]


def test_conversations_have_names_and_are_erased(environment: dict[str, str], tmp_path: Path) -> None:
    chat(environment, str(KIT), messages=[FIRST, "/save fox", "And then", "/save a/b", "/load nobody", "/clear"])
    assert names(environment) == ["fox"]
    folder = tmp_path / "home" / ".cache" / "edge-run" / "prompts"
    assert list(folder.rglob("*.rows"))
    modes = {path.stat().st_mode & 0o077 for path in folder.rglob("*")}
    assert modes == {0}
    again = run(environment, "chat", str(KIT), *SETTINGS, text="/load fox\nWhat else\n")
    assert "Going on with fox" in again.stderr
    shown = run(environment, "sessions", "show", "fox").stdout
    assert all(text in shown for text in ("And then", "What else"))
    assert run(environment, "sessions", "show", "nobody").returncode == 2
    assert run(environment, "sessions", "rm").returncode == 2
    erased = run(environment, "sessions", "rm", "--all")
    assert re.match(r"removed: 1 conversation, [\d.]+ [KM]iB of prompts", erased.stdout), erased.stdout
    assert not list(folder.rglob("*.rows"))
    assert run(environment, "chat", "--continue").returncode == 2


def test_no_conversation_is_written_over_by_another(environment: dict[str, str]) -> None:
    chat(environment, str(KIT), messages=["The first", "/save fox"])
    told = run(environment, "chat", str(KIT), *SETTINGS, text="The second\n/save fox\n").stderr
    assert "/save: fox: another conversation has this name" in told
    assert len(names(environment)) == 2
    assert run(environment, "sessions", "show", "fox").stdout.startswith("The first")

    command = Program(["chat", str(KIT), *SETTINGS])
    with begin(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin
        assert other.stderr
        print("/load fox\nOf one chat", file=other.stdin, flush=True)
        while "tokens/s" not in other.stderr.readline():
            assert other.poll() is None
        done = run(environment, "chat", "--continue", *SETTINGS, text="Of another\n/save fox\n")
        assert "Going on with fox" in done.stderr
        kept = re.search(r"Another chat went on with fox: this one is kept as (\S+)\.", done.stderr)
        assert kept, done.stderr
        other.stdin.close()
        assert other.wait(60) == 0
    assert len(names(environment)) == 3
    for name, last in (("fox", "Of one chat"), (kept[1], "Of another")):
        shown = run(environment, "sessions", "show", name).stdout
        assert shown.startswith("The first")
        assert [text for text in ("Of one chat", "Of another") if text in shown][-1] == last
    assert "Another chat" not in run(environment, "chat", "--continue", *SETTINGS).stderr


def test_a_chat_that_goes_on_has_its_own_system_prompt(environment: dict[str, str]) -> None:
    assert_refused(run(environment, "chat", "--continue", "-sys", "Be kind."), 2, "exclude each other")


def test_a_chat_that_cannot_be_kept_says_so_once(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(environment, "chat", str(KIT), *SETTINGS, "--cache-dir", str(tmp_path / "file"), text="One\nTwo\n")
    assert done.stderr.count("cannot be kept") == 1, done.stderr
    assert "Chats are kept in" not in done.stderr


def test_what_is_kept_is_found_and_erased_where_nothing_more_is_to_be_kept(
    environment: dict[str, str], tmp_path: Path
) -> None:
    chat(environment, str(KIT), messages=[FIRST, "/save fox"])
    (tmp_path / "home" / ".cache" / "edge-run" / "prompts" / "conversations" / ".held-killed").write_text("fox")
    environment = {**environment, "EDGE_RUN_PROMPT_CACHE": "off"}
    assert names(environment) == ["fox"]
    assert run(environment, "sessions", "rm", "--all").stdout.startswith("removed: 1 conversation, ")
    folder = tmp_path / "home" / ".cache" / "edge-run" / "prompts"
    assert not [*folder.rglob("*.rows"), *folder.rglob("conversations/*fox*"), *folder.rglob(".held-*")]


def test_nothing_is_kept_where_nothing_is_to_be_kept(environment: dict[str, str], tmp_path: Path) -> None:
    chat(environment, str(KIT), "--prompt-cache", "off", messages=[FIRST, "/save fox"])
    assert names(environment) == []
    assert not (tmp_path / "home" / ".cache" / "edge-run" / "prompts").exists()
