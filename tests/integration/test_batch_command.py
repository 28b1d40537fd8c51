"""`edge-run batch`: files of requests in, results out, whatever ends the program."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from edge_run import Model, ModelFileError, SamplingConfig
from kit_models import KIT, streamed
from program import WAIT_S, Program, begin, ending, run_program

pytest.importorskip("starlette")
from edge_run.runtime.batches.answering import PlacesHere
from edge_run.runtime.batches.results_file import ResultsFile
from edge_run.runtime.batches.run import BatchProgress, BatchRun

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OPTIONS = ("-c", "1024", "-t", "1", "--temp", "0")


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def results_of(path: Path) -> dict[str | None, dict[str, Any]]:
    found = [json.loads(one) for one in path.read_text().splitlines()]
    assert max(Counter(one["custom_id"] for one in found).values()) == 1
    return {one["custom_id"]: one["response"] for one in found}


def texts_of(path: Path) -> dict[str | None, str]:
    return {name: one["body"]["choices"][0]["text"] for name, one in results_of(path).items()}


@pytest.mark.parametrize("in_order", [False, True])
def test_every_request_has_a_result(tmp_path: Path, in_order: bool) -> None:
    lines = [line(f"n{i}", prompt=f"Number {i}", max_tokens=3 + 9 * (i % 3)) for i in range(12)]
    lines += [
        line("chat", CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=4),
        line("schema", prompt="A colour:", max_tokens=12, response_format={"type": "json_object"}),
        line("two", prompt="Once", n=2, max_tokens=3),
        line("long", prompt="word " * 3000),
        line("nonsense", prompt="Once", temperature="hot"),
        line("elsewhere", "/v1/embeddings", input="x"),
        "no JSON",
    ]
    done = run_program(
        "batch",
        write(tmp_path / "in", lines),
        "-m",
        KIT,
        "-o",
        tmp_path / "out",
        *OPTIONS,
        *["--in-order"] * in_order,
        "--chat-template",
        "{{ messages[0].content }}",
    )
    assert done.returncode == 0, done.stderr
    assert "19 requests answered, 4 of them with an error" in done.stderr
    found = results_of(tmp_path / "out")
    if in_order:
        assert [*found] == [*(f"n{i}" for i in range(12)), "chat", "schema", "two", "long", "nonsense", "elsewhere",
                            None]  # fmt: skip
    failed = {name: one["status_code"] for name, one in found.items() if one["status_code"] != 200}
    assert failed == {"long": 400, "nonsense": 400, "elsewhere": 400, None: 400}
    assert [one["line"] for one in map(json.loads, (tmp_path / "out").read_text().splitlines()) if "line" in one] == [
        19
    ]
    assert found["chat"]["body"]["object"] == "chat.completion"
    assert len(found["two"]["body"]["choices"]) == 2
    assert found["n1"]["body"]["usage"]["completion_tokens"] == 12
    error = found["long"]["body"]["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_more_at_once_than_a_server_would_prepare(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line(f"n{i}", prompt=f"Number {i}", max_tokens=1) for i in range(44)])
    done = run_program("batch", source, "-m", KIT, "-o", tmp_path / "out", *OPTIONS, "--parallel", "44")
    assert "44 requests answered;" in done.stderr
    assert {one["status_code"] for one in results_of(tmp_path / "out").values()} == {200}


def test_killed_at_any_moment_nothing_is_lost_or_done_twice(tmp_path: Path) -> None:
    lengths = [*[12] * 59, 400]  # so that it is not over while its last answers are counted
    lines = [line(f"n{i}", prompt=f"Number {i} is", max_tokens=n) for i, n in enumerate(lengths)]
    source = write(tmp_path / "in", lines)
    assert (
        run_program("batch", source, "-m", KIT, "-o", tmp_path / "whole", *OPTIONS, "--parallel", "1").returncode == 0
    )
    program = Program(["batch", str(source), "-m", str(KIT), "-o", str(tmp_path / "out"), *OPTIONS])
    n_before = -1
    for moment in range(3):
        with ending(begin(program, stderr=subprocess.PIPE)) as process:
            wait_for_lines(tmp_path / "out", process, 5 + 15 * moment)
            process.send_signal(signal.SIGKILL)
            process.communicate()
        n_now = (tmp_path / "out").read_bytes().count(b"\n")
        assert n_before < n_now < 60
        n_before = n_now
    with (tmp_path / "out").open("ab") as file:
        file.write(b'{"id": "batch_req_1", "custom_')  # as a power cut may leave it
    done = run_program("batch", source, "-m", KIT, "-o", tmp_path / "out", *OPTIONS)
    assert f"{60 - n_before} requests answered, {n_before} were there" in done.stderr
    found, wanted = texts_of(tmp_path / "out"), texts_of(tmp_path / "whole")
    assert found.keys() == wanted.keys()
    assert sum(found[name] == wanted[name] for name in wanted) >= 57  # near ties may part a few


def test_ctrl_c_ends_it_at_once_and_what_is_done_stays(tmp_path: Path) -> None:
    lengths = [5, *[400] * 199]  # the first is done soon
    source = write(tmp_path / "in", [line(f"n{i}", prompt=f"Number {i}", max_tokens=n) for i, n in enumerate(lengths)])
    command = [sys.executable, "-m", "edge_run", "batch", source, "-m", KIT, "-o", tmp_path / "out", "-c", "16384"]
    with ending(subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)) as process:
        wait_for_lines(tmp_path / "out", process, 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        assert "Traceback" not in process.communicate()[1]
    assert 1 <= len(results_of(tmp_path / "out")) < 200


def wait_for_lines(path: Path, process: subprocess.Popen[Any], n_lines: int) -> None:
    end = time.monotonic() + WAIT_S
    while not path.exists() or path.read_bytes().count(b"\n") < n_lines:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_cannot_be_is_said_before_anything_is_opened(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line("a", prompt="x", max_tokens=1)])
    for words, message in [
        ((tmp_path / "none", "-m", KIT, "-o", tmp_path / "out"), "check the path and its permissions"),
        ((source, "-m", KIT, "-o", source), "is the file of the requests"),
        (
            (source, "-m", KIT, "-o", tmp_path / "none" / "out"),
            "give another one (-o)",
        ),
        ((source, "-m", KIT), "--output"),
        ((source, "-o", tmp_path / "out"), "--model"),
        ((source, "-m", KIT, "-o", tmp_path / "out", "--parallel", "0"), "parallel"),
    ]:
        done = run_program("batch", *words)
        assert done.returncode == 2, (words, done.stderr)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert json.loads(source.read_text())["custom_id"] == "a"
    assert not os.path.exists(tmp_path / "out") or not (tmp_path / "out").read_bytes()


def test_a_model_that_changes_meanwhile_is_no_requests_result(tmp_path: Path, grown: Path) -> None:
    model = Path(shutil.copy(grown, tmp_path / "model.gguf"))
    write(tmp_path / "in", [line(f"n{i}", prompt=f"Number {i}", max_tokens=2) for i in range(9)])

    def answer_all(on_progress: Callable[[], None]) -> None:
        async def main() -> None:
            with ResultsFile(tmp_path / "out") as results:
                async with PlacesHere.of(Model(model, **streamed(), sequences=2), SamplingConfig()) as places:
                    await BatchRun(tmp_path / "in", results, BatchProgress(9), on_progress).run(places)

        anyio.run(main)

    with pytest.raises(ModelFileError, match="changed"):
        answer_all(lambda: os.utime(model, (0, 0)))
    assert len(results_of(tmp_path / "out")) < 9
    answer_all(lambda: None)
    found = results_of(tmp_path / "out")
    assert len(found) == 9
    assert {one["status_code"] for one in found.values()} == {200}
