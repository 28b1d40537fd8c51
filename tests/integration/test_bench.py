"""`edge-run bench`: real runs, cold and in turn; what is compared, drawn, refused, and what is left behind: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import bench_samples as samples
from edge_run import inflate
from edge_run.base.bench import MMAP, OURS, Measurement
from edge_run.base.config import ModelConfig
from edge_run.base.units import MIB
from edge_run.cli import app
from edge_run.cli.shared.terminal import Terminal
from edge_run.devices.host.scratch import NoScratchError
from edge_run.runtime.bench import bench as module
from edge_run.runtime.bench import cold_run
from edge_run.runtime.bench.cold_run import ColdRuns, OutOfMemory
from edge_run.runtime.bench.memory_group import PREFIX, OwnMemoryGroup
from kit_models import KIT

BUDGET_BYTES = 160 * MIB
WAIT_S = 60
SCRIPT = """
import sys, bench_samples
from edge_run.cli.app import main
from edge_run.runtime.bench import bench
bench.probe = lambda *given, **named: bench_samples.PROFILE
main(sys.argv[1:])
"""


def arguments(model: Path, folder: Path, *more: object) -> list[str]:
    words = ["bench", model, "--memory", BUDGET_BYTES, "-c", 256, "-ub", 16, "-t", 1, "--cache-dir", folder / "cache"]
    return [str(word) for word in [*words, "--prompt-tokens", 16, "-n", 3, *more]]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The grown model, for these tests alone: what others read of it meanwhile would not be cold."""
    return inflate(KIT, tmp_path_factory.mktemp("grown") / "grown.gguf", 120 * MIB, layers=12)


@pytest.fixture(autouse=True)
def _known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile at hand: measuring one takes longer than these tests may."""
    monkeypatch.setattr(module, "probe", lambda *given, **named: samples.PROFILE)


def left_over(pid: int | None = None) -> list[Path]:
    """The groups of a process. Others come and go meanwhile, which `os.walk` takes as it comes."""
    folders = (Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup"))
    return [folder for folder in folders if folder.name == f"{PREFIX}{pid or os.getpid()}"]


def run(*words: str) -> int:
    return app._run(list(words), Terminal())


def test_streamed_model_is_predicted_measured_compared_and_drawn(
    grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    assert run(*arguments(grown, tmp_path, "--rounds", 2, "--json", "--plot", picture)) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    found: dict[str, Any] = json.loads(output)
    assert [m["backend"] for m in found["measurements"]] == [OURS, MMAP, OURS, MMAP]
    ours, mmap = found["measurements"][:2]
    assert (ours["mode"], mmap["mode"], found["plan"]["mode"]) == ("streamed", "llama.cpp", "streamed")
    assert found["has_same_tokens"] is True
    assert len(ours["token_ids"]) == 3
    assert ours["peak_bytes"] <= BUDGET_BYTES
    assert ours["swapped_bytes"] == 0
    assert 0 < ours["bytes_per_token"] <= found["plan"]["model_bytes"] + 4 * MIB
    assert found["plan"]["forecast"]["prompt_tokens"] == 16
    assert all(c["measured"] and c["mmap"] and c["predicted"] for c in found["comparisons"] if c["name"] != "load_s")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    assert found["box"]["limit_bytes"] in (0, BUDGET_BYTES)
    assert bool(found["box"]["reason"]) == (found["box"]["limit_bytes"] == 0)
    if found["box"]["limit_bytes"]:
        assert mmap["bytes_read"] > found["plan"]["model_bytes"] / 2, "it was not cold"
    assert not left_over()


def test_edge_run_alone_in_words(grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments(grown, tmp_path, "--rounds", 1, "--no-mmap")) == 0
    output = capsys.readouterr()
    assert "decode: predicted" in output.out
    assert "mmap" not in output.out
    assert output.err == ""


def test_without_a_memory_group_it_says_so(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cold_run, "OwnMemoryGroup", lambda limit: OwnMemoryGroup(limit, tmp_path))
    assert run(*arguments(grown, tmp_path, "--rounds", 1)) == 0
    assert "llama.cpp's mmap had all of the page cache: no memory group" in capsys.readouterr().out


def test_other_tokens_are_an_error(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lie(self: object, config: ModelConfig, *given: object) -> Measurement:
        return samples.measurement(config.backend, token_ids=(1, 2, 3) if config.backend == OURS else (1, 2, 4))

    monkeypatch.setattr(ColdRuns, "run", lie)
    picture = tmp_path / "picture.png"
    assert run(*arguments(kit, tmp_path, "--plot", picture)) == 6
    output = capsys.readouterr()
    assert "DIFFERENT TOKENS" in output.err
    assert "decode" in output.out
    assert not picture.exists()


def test_runs_are_of_what_was_planned(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the width and the context that the plan chose where nobody asked for any, and without a forecast.

    As of a small model in a folder that cannot be written to, beside which its disk cannot be measured.
    """
    configs: list[ModelConfig] = []

    def fail(*given: object, **named: object) -> None:
        raise NoScratchError("/models: writing failed")

    def note(self: object, config: ModelConfig, *given: object) -> Measurement:
        configs.append(config)
        return samples.measurement(config.backend)

    monkeypatch.setattr(ColdRuns, "run", note)
    monkeypatch.setattr(module, "probe", fail)
    words = ["bench", kit, "--memory", BUDGET_BYTES, "-t", 1, "--cache-dir", tmp_path, "--prompt-tokens", 16, "--json"]
    assert run(*map(str, words)) == 0
    found = json.loads(capsys.readouterr().out)
    plan = found["plan"]
    assert plan["forecast"] is None
    assert (found["profiled_at"], found["profile_problem"]) == ("", "/models: writing failed")
    assert [config.backend for config in configs] == [OURS, MMAP, OURS, MMAP]
    shapes = {(config.context_tokens, config.micro_batch_tokens) for config in configs}
    assert shapes == {(plan["context_tokens"], plan["micro_batch_tokens"])}
    assert plan["micro_batch_tokens"] > 0


def test_mmap_that_has_too_little_memory_is_left_out(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[str] = [MMAP]

    def killing(self: object, config: ModelConfig, *given: object) -> Measurement:
        if config.backend in killed:
            raise OutOfMemory(kit, BUDGET_BYTES)
        return samples.measurement(config.backend)

    monkeypatch.setattr(ColdRuns, "run", killing)
    assert run(*arguments(kit, tmp_path)) == 0
    assert "mmap was not measured to the end: the kernel ended it" in capsys.readouterr().out
    killed.append(OURS)
    assert run(*arguments(kit, tmp_path)) == 4
    assert "more than its budget" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--prompt-tokens", "300"], 8, "do not fit the context of 256"),
        (["--memory", "20MiB"], 4, "needs at least"),
        (["-n", "1"], 2, "predict"),
        (["--plot", "/nowhere/a.png"], 5, "cannot be written"),
        (["--plot", "a.jpg"], 2, "must be a PNG"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    more: list[str], code: int, message: str, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ColdRuns, "run", lambda *given: pytest.fail("it ran"))
    assert run(*arguments(grown, tmp_path, *more)) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not left_over()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signals_end_it_and_nothing_is_left(number: int, code: int, grown: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(samples.__file__).parent)}
    command = [sys.executable, "-c", SCRIPT, *arguments(grown, tmp_path, "--rounds", 50, "-n", 60)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        measuring = wait_for_child(process.pid)
        time.sleep(0.3)
        process.send_signal(number)
        output, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, output, errors) == (code, b"", b"")
    psutil.wait_procs([measuring], timeout=50)
    assert not measuring.is_running()
    assert number == signal.SIGKILL or not left_over(process.pid)


def wait_for_child(pid: int) -> psutil.Process:
    """Return the process that measures, once there is one."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children():
            try:
                if any("edge_run.runtime.bench.child" in word for word in child.cmdline()):
                    return child
            except psutil.Error:
                pass
        time.sleep(0.05)
    raise AssertionError("nothing was measured")


def test_a_measurement_runs_no_code_from_the_folder_that_it_is_started_in(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('foreign')\n")
    monkeypatch.chdir(tmp_path)
    config = ModelConfig(context_tokens=256, threads=1, cache_folder=tmp_path / "cache")
    found = ColdRuns([kit], BUDGET_BYTES).run(config, [1, 2, 3], 2, lambda passed_s: None)
    assert len(found.token_ids) == 2


@pytest.mark.root
def test_memory_group_holds_a_process_to_its_limit() -> None:
    group = OwnMemoryGroup(64 * MIB)
    if group.reason:
        pytest.skip(group.reason)
    take = "import sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0'); print(len(b'1' * (100 << 20)))"
    try:
        folder = group.renew()
        assert folder is not None
        done = subprocess.run([sys.executable, "-c", take, str(folder)], capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL
        assert group.kills == 1
        assert group.renew() == folder
        assert group.kills == 0
    finally:
        group.close()
    assert not left_over()


@pytest.mark.root
def test_group_of_a_process_that_was_killed_is_removed() -> None:
    first = OwnMemoryGroup(64 * MIB)
    if first.reason:
        pytest.skip(first.reason)
    folder = first.renew()
    assert folder is not None
    first.close()
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder.parent / f"{PREFIX}{ended.pid}").mkdir()
    OwnMemoryGroup(64 * MIB).close()
    assert not left_over(ended.pid)
