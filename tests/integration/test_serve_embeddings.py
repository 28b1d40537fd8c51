"""`edge-run serve` of an encoder, as clients of three APIs meet it, and `edge-run embed`."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from edge_run import Model
from edge_run.base.errors import ContextFull
from edge_run.runtime.server.apis.embeddings import MOST_TEXTS
from llama_tensors import silence_llama_logs
from program import Program, assert_refused, begin, run_program
from served import Served, served
from tiny_models import make_model

LONGEST = 64
OPTIONS = ("-c", LONGEST, "-t", 1)
TEXTS = ["one text", "and another one, which is longer"]
TOO_LONG = "five " * 100


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    silence_llama_logs()
    return make_model("nomic-bert", tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def model(encoder: Path) -> Iterator[Model]:
    with Model(encoder, context_tokens=LONGEST, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def server(encoder: Path) -> Iterator[Served]:
    with served(encoder, *OPTIONS, "--parallel", 1) as server:
        yield server


@pytest.fixture(scope="module")
def post(server: Served) -> Iterator[Callable[..., httpx.Response]]:
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def post(path: str, **body: Any) -> httpx.Response:
            return http.post(path, json=body)

        yield post


def equal(found: Any, wanted: np.ndarray) -> bool:
    return np.array_equal(np.array(found, np.float32), wanted)


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}], ids=["base64", "float"])
def test_the_official_client_gets_the_vectors_of_model(server: Served, model: Model, options: dict[str, Any]) -> None:
    """Its own default is base64, which it decodes itself."""
    import openai

    wanted = model.embed(TEXTS)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none needed", max_retries=0, timeout=60) as client:
        found = client.embeddings.create(model="any", input=TEXTS, **options)
    assert equal([one.embedding for one in found.data], wanted.vectors)
    assert [one.index for one in found.data] == [0, 1]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(wanted.tokens)


def test_texts_and_tokens_in_every_form(post: Callable[..., httpx.Response], model: Model) -> None:
    tokens = [model.tokenize(text) for text in TEXTS]
    wanted = model.embed(TEXTS).vectors
    for given, rows in (
        (TEXTS[0], wanted[:1]),
        (tokens[0], wanted[:1]),
        (tokens, wanted),
        ([TEXTS[0], tokens[1]], wanted),
    ):
        data = post("/v1/embeddings", input=given, dimensions=256).json()["data"]
        assert equal([one["embedding"] for one in data], rows)
    raw = post("/v1/embeddings", input=TEXTS[0], encoding_format="base64").json()["data"][0]["embedding"]
    assert equal(np.frombuffer(base64.b64decode(raw), "<f4"), wanted[0])


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llama_servers_own_words(post: Callable[..., httpx.Response], model: Model, path: str) -> None:
    raw = model.embed(TEXTS, normalize=False).vectors
    found = post(path, content=TEXTS, embd_normalize=-1).json()
    assert [one["index"] for one in found] == [0, 1]
    assert equal([one["embedding"] for one in found], raw[:, None])
    assert equal(post(path, input=TEXTS[0]).json()[0]["embedding"], model.embed(TEXTS[0]).vectors)


def test_ollamas_words(post: Callable[..., httpx.Response], model: Model) -> None:
    wanted = model.embed(TEXTS)
    found = post("/api/embed", model="any", input=TEXTS).json()
    assert equal(found["embeddings"], wanted.vectors)
    assert found["prompt_eval_count"] == sum(wanted.tokens)
    old = post("/api/embeddings", model="any", prompt=TEXTS[0]).json()["embedding"]
    assert equal(old, model.embed(TEXTS[0], normalize=False).vectors[0])
    assert post("/api/embed", model="any").json()["embeddings"] == post("/api/embeddings").json()["embedding"] == []
    shown = post("/api/show", model="any").json()
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"]["nomic-bert.embedding_length"] == 256


def test_texts_that_are_too_long(post: Callable[..., httpx.Response], model: Model) -> None:
    """Ollama's API has them cut, unless it is told not to."""
    for path in ("/v1/embeddings", "/embedding"):
        refused = post(path, input=[TEXTS[0], TOO_LONG])
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
        assert "text 2: has 100 tokens, and the longest that has a vector here has 64" in error["message"]
    cut = post("/api/embed", input=TOO_LONG).json()["embeddings"]
    assert equal(cut, model.embed(TOO_LONG, truncate=True).vectors)
    assert post("/api/embed", input=TOO_LONG, truncate=False).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * (MOST_TEXTS + 1)}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "dimensions": 64}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/embedding", {}, "input"),
        ("/embedding", {"content": "a", "embd_normalize": 1}, "embd_normalize"),
        ("/embedding", {"content": "a", "image_data": [1]}, "image_data"),
        ("/v1/embeddings", {"input": [384]}, None),
    ],
)
def test_what_cannot_be(
    post: Callable[..., httpx.Response], path: str, body: dict[str, Any], param: str | None
) -> None:
    refused = post(path, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/api/generate", {"prompt": "x"}),
        ("/completion", {"prompt": "x"}),
    ],
)
def test_an_encoder_answers_no_chat(post: Callable[..., httpx.Response], path: str, body: dict[str, Any]) -> None:
    refused = post(path, **body)
    assert refused.status_code == 400
    assert "makes embeddings and no text: ask at /v1/embeddings" in refused.text


def test_what_is_served_is_told(server: Served, post: Callable[..., httpx.Response]) -> None:
    post("/v1/embeddings", input=TEXTS)
    status = httpx.get(f"{server.url}/edge-run/status", timeout=60).json()
    assert status["model"]["embedding"] == {"pooling": "mean", "width": 256, "longest_text_tokens": LONGEST}
    assert status["requests"]["finished"]["stop"] > 0
    assert status["tokens"]["prompt"] > 0


def test_texts_at_the_command_line(encoder: Path, model: Model, tmp_path: Path) -> None:
    """A new file is opened by a child process first; lines of files, and JSON, have the digits of each float32."""
    wanted = model.embed([*TEXTS, TOO_LONG], truncate=True).vectors
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join([*TEXTS, TOO_LONG, ""]))
    words = ("embed", encoder, *OPTIONS, "--parallel", 1)
    found = run_program(*words, lines, "--truncate", "--cache-dir", tmp_path)
    assert found.returncode == 0, found.stderr
    assert equal([line.split() for line in found.stdout.splitlines()], wanted)
    assert "1 text cut to 64 tokens" in found.stderr
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert run_program(*words, empty, lines, "--truncate", "--cache-dir", tmp_path).stdout == found.stdout
    assert_refused(run_program(*words, empty, "--cache-dir", tmp_path), 2, "none in .*empty.txt")
    prompts = ("-p", TEXTS[0], "-p", TEXTS[1], "--json", "--no-normalize")
    found = run_program(*words, *prompts, "--cache-dir", tmp_path)
    documents = [json.loads(line) for line in found.stdout.splitlines()]
    assert [document["index"] for document in documents] == [0, 1]
    assert [document["tokens"] for document in documents] == list(model.embed(TEXTS).tokens)
    assert equal([one["embedding"] for one in documents], model.embed(TEXTS, normalize=False).vectors)


def test_lines_are_answered_as_they_come(encoder: Path, tmp_path: Path) -> None:
    """All of them were read, and tokenized twice, before the first was computed."""
    words = ("embed", encoder, *OPTIONS, "--parallel", 1, "--cache-dir", tmp_path, "--json")
    command = Program([str(word) for word in words])
    with begin(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        for number in range(3):
            print(TEXTS[number % 2], file=process.stdin, flush=True)
            assert json.loads(process.stdout.readline())["index"] == number
        process.stdin.write(TOO_LONG)
        process.stdin.close()
        assert process.stderr
        assert "text 4: has " in process.stderr.read()
        assert (process.stdout.read(), process.wait(60)) == ("", ContextFull.exit_code)


def test_a_file_that_is_not_there_is_said_before_any_is_read(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\n")
    done = run_program("embed", encoder, *OPTIONS, tmp_path / "lines.txt", tmp_path / "none.txt")
    assert_refused(done, 2, "none.txt: cannot be read")


def test_a_text_that_is_too_long_at_the_command_line(encoder: Path, tmp_path: Path) -> None:
    refused = run_program("embed", encoder, *OPTIONS, "-p", TOO_LONG, "--cache-dir", tmp_path)
    assert (refused.returncode, refused.stdout) == (ContextFull.exit_code, "")
    assert "text 1: has 100 tokens, and the longest that has a vector here has 64; shorten it" in refused.stderr
