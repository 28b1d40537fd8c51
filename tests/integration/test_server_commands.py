"""`edge-run chat --server` and `edge-run bench --server` with a running `edge-run serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_run import Model
from program import run_program
from screens import Screen
from served import TEMPLATE, Served, served

KEY = "a-key-of-many-letters"
HEADERS = {"authorization": f"Bearer {KEY}"}
CONTEXT_TOKENS = 16_384  # what fills it takes so long that it can be stopped


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"  # of this test\n {KEY} \n")
    return file


@pytest.fixture(scope="module")
def server(kit: Path, keys: Path) -> Iterator[Served]:
    words = ("-c", CONTEXT_TOKENS, "-t", 1, "--exact", "--parallel", 1, "--chat-template", TEMPLATE)
    with served(kit, *words, "--api-key-file", keys) as server:
        yield server


def test_a_chat_has_the_words_of_the_model(server: Served, kit: Path, keys: Path) -> None:
    done = run_program(
        "chat", "--server", server.port, "--api-key-file", keys, "--temp", 0, "-n", 8, "-sys", "Be kind.",
        text="Tell me of the fox.\nAnd then?\n/stats\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"kit-dense-q4_0 at {server.url}" in done.stderr
    messages = [{"role": "system", "content": "Be kind."}]
    with Model(kit, context_tokens=CONTEXT_TOKENS, threads=1, exact=True, chat_template=TEMPLATE) as model:
        for text in ("Tell me of the fox.", "And then?"):
            messages.append({"role": "user", "content": text})
            answer = model.chat(messages, max_tokens=8, temperature=0).text
            assert answer in done.stdout
            messages.append({"role": "assistant", "content": answer})
    assert "2 answers of 16 tokens together" in done.stderr


def test_ctrl_c_stops_an_answer_and_not_the_chat(server: Served, screen: Callable[..., Screen]) -> None:
    chat = screen("chat", "--server", server.url, "--ignore-eos", EDGE_RUN_API_KEY=KEY)
    chat.wait_for("> ")
    chat.type("Tell me of the fox.\n")
    chat.wait_for(r"fox\.\n\n?[^>]")
    chat.process.send_signal(signal.SIGINT)
    chat.wait_for(r"Stopped\.\n> ")
    chat.type("/exit\n")
    assert chat.end() == 0


def test_ctrl_c_ends_a_chat_from_a_pipe(server: Served) -> None:
    command = [sys.executable, "-m", "edge_run", "chat", "--server", server.url, "--ignore-eos"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "EDGE_RUN_API_KEY": KEY}, **pipes) as chat:
        assert chat.stdin
        assert chat.stdout
        chat.stdin.write(b"Tell me of the fox.\nAnd then?\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        _, said = chat.communicate(timeout=60)
        assert chat.returncode == 130
        assert said.endswith(b"Stopped.\n")


def test_a_load_in_json(server: Served, keys: Path) -> None:
    done = run_program(
        "bench", "--server", server.url, "--api-key-file", keys, "--clients", 2, "--seconds", 4, "--prompt-tokens", 16,
        "-n", 4, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answers"] > 0
    assert found["tokens"] >= 4 * found["answers"]
    assert found["errors"] == 0
    assert found["first_token_s"]["median"] <= found["first_token_s"]["p99"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("chat", "--server", "{url}"), "give a key with --api-key-file or EDGE_RUN_API_KEY"),
        (("chat", "--server", "1"), "nobody listens"),
        (("chat", "--server", "1", "--continue"), "--continue: is for a model that is opened here"),
        (("chat", "--server", "1", "--memory", "1GiB"), "--memory: is for a model that is opened here"),
        (("bench", "--server", "1", "-c", "256"), "--ctx-size: is for a model that is opened here"),
        (("bench", "--server", "1", "--rounds", "3"), "--rounds: is for a model that is opened here"),
        (("bench", "--server", "{url}", "--seconds", "1", "--clients", "1"), "not a token came"),
        (("bench", "--server", "1"), "nobody listens"),
        (("bench", "--server", "http://a..b"), "a..b"),
        (("bench", "--server", "1", "--plot", "x.png"), "leave it out with --server"),
        (("bench", "--server", "1", "--clients", "10001"), "10001 is not in the range 1<=x<=10000"),
        (("bench", "--server", "1", "--prompt-tokens", "1000001"), "must be at most 1000000 with --server"),
        (("chat", "--server", "1", "--json-schema", "[1"), "is not JSON"),
        (("chat", "--server", "http://a..b"), "a..b"),
        (("bench",), "none given"),
        (("bench", "model.gguf", "--api-key-file", "keys"), "name it with --server"),
        (("bench", "model.gguf", "--clients", "2"), "--clients: is for a server; name it with --server"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(server: Served, words: tuple[str, ...], why: str) -> None:
    done = run_program(*(word.format(url=server.url) for word in words))
    assert done.returncode in (2, 9)
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_of_a_model_that_nobody_gave_as_flags_are_left_alone() -> None:
    done = run_program("chat", "--server", "1", "-v", environment={**os.environ, "EDGE_RUN_MEMORY": "1GiB"})
    assert "(EDGE_RUN_MEMORY)" in done.stderr
    assert "nobody listens" in done.stderr


def test_stopped_answers_leave_nothing_running(server: Served) -> None:
    server.wait_until(running=0, waiting=0, headers=HEADERS)
    before = server.aborted(headers=HEADERS)
    body = {"prompt": "Once", "max_tokens": CONTEXT_TOKENS - 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", headers=HEADERS, json=body, timeout=60) as response:
        lines = response.iter_lines()  # which would close the response when it is forgotten
        next(lines)
        assert server.requests(headers=HEADERS) == (1, 0)
    server.wait_until(running=0, waiting=0, headers=HEADERS)
    assert server.aborted(headers=HEADERS) == before + 1
