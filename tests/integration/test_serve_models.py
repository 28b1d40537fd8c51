"""`edge-run serve --models`: the models of a folder, one open at a time."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_run import Model
from edge_run.base.errors import ModelFileError
from edge_run.base.units import MIB
from kit_models import KIT
from program import run_program
from served import EXACTLY, Served, served, wait_for
from tiny_models import make_model

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(KIT, folder / "kit.gguf")
    make_model("llama", folder).rename(folder / "tiny.gguf")
    (folder / "broken.gguf").write_bytes(KIT.read_bytes()[:4000])
    data = bytearray(KIT.read_bytes())
    data[data.index(b"llama.block_count") + 21] = 99  # whose header can be read, and which cannot be opened
    (folder / "wrong.gguf").write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Served]:
    with served(None, "--models", models, *EXACTLY, "--memory", 400 * MIB, "--metrics") as server:
        yield server


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=100)


def get(server: Served, path: str) -> Any:
    return server.get(path).json()


def text(server: Served, model: str) -> str:
    found = post(server, "/v1/completions", model=model, prompt=PROMPT, max_tokens=8, temperature=0).json()
    assert found["model"] == model
    return str(found["choices"][0]["text"])


def states(server: Served) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in get(server, "/v1/models")["data"]}


def test_each_answers_for_itself(server: Served, models: Path) -> None:
    assert states(server) == {"kit": "unloaded", "tiny": "unloaded", "wrong": "unloaded"}
    assert get(server, "/api/ps") == {"models": []}
    assert get(server, "/edge-run/status")["model"] is None
    assert get(server, "/slots") == []
    for name in ("kit", "tiny", "kit"):
        with Model(models / f"{name}.gguf", context_tokens=512, threads=1, exact=True) as model:
            wanted = model.generate(PROMPT, max_tokens=8, temperature=0).result().text
        assert text(server, name) == wanted
        assert states(server)[name] == "loaded"
        (running,) = get(server, "/api/ps")["models"]
        assert running["name"] == f"{name}:latest"
        assert get(server, "/edge-run/status")["model"]["name"] == name
    memory = get(server, "/edge-run/status")["memory"]
    assert memory["peak_bytes"] <= memory["budget_bytes"] == 400 * MIB


def test_what_is_wrong_with_one_is_its_own(server: Served) -> None:
    assert "left out: " in server.said
    (left_out,) = get(server, "/edge-run/status")["left_out"]
    assert left_out["file"] == "broken.gguf"
    assert post(server, "/v1/completions", model="broken", prompt=PROMPT).status_code == 404
    refused = post(server, "/v1/completions", model="wrong", prompt=PROMPT)
    assert refused.status_code in (400, 500)
    assert "wrong.gguf" in refused.json()["error"]["message"]
    assert states(server)["wrong"] == "failed"
    assert text(server, "tiny")


@pytest.mark.parametrize("name", ["broken", "none"])
def test_a_model_alone_that_cannot_be_opened_ends_the_command(models: Path, name: str) -> None:
    done = run_program("serve", models / f"{name}.gguf", "--port", 0)
    assert (done.returncode, done.stderr.count("\n")) == (ModelFileError.exit_code, 1)
    assert str(models / f"{name}.gguf") in done.stderr


def test_requests_for_both_at_once_are_all_answered(server: Served) -> None:
    found: list[int] = []

    def ask(name: str) -> None:
        found.append(post(server, "/v1/completions", model=name, prompt=PROMPT, max_tokens=4).status_code)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("kit", "tiny") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert found == [200] * 8


def test_a_stream_for_another_model_has_its_headers_at_once(server: Served) -> None:
    body = {"model": "kit", "prompt": PROMPT, "max_tokens": 100_000, "n": 16, "stream": True}  # takes many seconds
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as running:
        lines = running.iter_lines()
        next(lines)
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "model": "tiny", "max_tokens": 3, "n": 1}, timeout=60
        ) as it:
            assert it.status_code == 200
            assert states(server)["tiny"] in ("unloaded", "loading")
            running.close()
            *_, last, end = [line.removeprefix("data: ") for line in it.iter_lines() if line.startswith("data: ")]
    assert end == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"


def test_what_a_request_takes_is_not_the_programs_of_the_model_that_is_opened_for_it(server: Served) -> None:
    program_bytes, n_large = list[int](), 900_000  # of 40 bytes each, once they are read
    for prompt in ([1], [*range(100_000, 100_000 + n_large)]):
        text(server, "kit")
        answer = post(server, "/v1/completions", model="tiny", prompt=prompt, max_tokens=1)
        assert answer.status_code == (200 if len(prompt) == 1 else 400)
        items = get(server, "/edge-run/status")["memory"]["items"]
        program_bytes += [item["size_bytes"] for item in items if item["what"] == "program"]
    small, large = program_bytes
    assert abs(large - small) < 40 * n_large // 3


def test_ollamas_names_and_how_long_a_model_stays(server: Served) -> None:
    assert [one["name"] for one in get(server, "/api/tags")["models"]] == ["kit:latest", "tiny:latest", "wrong:latest"]
    shown = post(server, "/api/show", model="tiny:latest").json()
    assert shown["model_info"]["general.architecture"] == "llama"
    answer = post(server, "/api/generate", model="tiny:latest", keep_alive="1h")
    assert answer.json()["done_reason"] == "load"
    (running,) = get(server, "/api/ps")["models"]
    assert running["expires_at"] < "9999"
    assert post(server, "/api/generate", model="tiny", keep_alive=0).json()["done_reason"] == "unload"
    wait_for(lambda: not get(server, "/api/ps")["models"])
    assert post(server, "/api/generate", model="tiny", keep_alive="soon").status_code == 400


def test_figures_of_each(server: Served) -> None:
    text(server, "kit")
    text(server, "tiny")
    lines = server.get("/metrics").text.splitlines()
    assert 'edge_run:model_open{model_name="tiny"} 1.0' in lines
    assert 'edge_run:model_open{model_name="kit"} 0.0' in lines
    assert any(line.startswith('vllm:generation_tokens_total{model_name="kit"} ') for line in lines)


def test_sighup_looks_for_models_anew(server: Served, models: Path) -> None:
    shutil.copy(KIT, models / "second.gguf")
    (models / "wrong.gguf").unlink()
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: sorted(states(server)) == ["kit", "second", "tiny"])
    assert text(server, "second") == text(server, "kit")
