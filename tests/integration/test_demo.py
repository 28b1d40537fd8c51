"""`edge-run demo` and what runs beside it: mmap in as much memory, a picture of both, or why not.

Both runs are played, but for the last test; that a grown model streams and leaves nothing behind is in test_cli.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bench_samples as samples
from edge_run.base.bench import MMAP, OURS, Measurement
from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError
from edge_run.cli import app
from edge_run.cli.commands import demo as module
from edge_run.cli.reports import demo_picture
from edge_run.cli.shared.answer import WrittenAnswer
from edge_run.cli.shared.terminal import Terminal
from edge_run.runtime.bench import cold_run
from edge_run.runtime.bench.beside_mmap import MMAP_SECONDS
from edge_run.runtime.bench.cold_run import ColdRuns, OutOfMemory
from edge_run.runtime.bench.memory_group import OwnMemoryGroup
from program import run_program

Run = Callable[..., int]
Played = Callable[[ModelConfig, Callable[[float], None]], Measurement]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kit: Path) -> Run:
    """The command, in this process, with an answer that was written already."""

    def stream(*given: object) -> WrittenAnswer:
        return WrittenAnswer("", SimpleNamespace(finish_reason="length"))  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_stream", stream)
    return lambda *more: app._run(
        ["demo", "--model", str(kit), "--cache-dir", str(tmp_path / "cache"), "-t", "1", *more], Terminal()
    )


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Played], None]:
    """What has all measurements played, in a group that is there."""

    class Group:
        limit_bytes, reason, kills = 1, "", 0

        def __init__(self, limit_bytes: int) -> None: ...
        def close(self) -> None: ...

    def play(outcome: Played) -> None:
        def measured(
            self: object, config: ModelConfig, prompt: Sequence[int], n_tokens: int, on_tick: Callable[[float], None]
        ) -> Measurement:
            assert (len(prompt), n_tokens, config.check_file) == (16, 6, False)
            return outcome(config, on_tick)

        monkeypatch.setattr(cold_run, "OwnMemoryGroup", Group)
        monkeypatch.setattr(ColdRuns, "run", measured)

    return play


def test_both_are_drawn(run: Run, played: Any, capsys: pytest.CaptureFixture[str]) -> None:
    played(lambda config, on_tick: samples.measurement(config.backend))
    assert run() == 0
    said = capsys.readouterr().err
    assert "each cold, in a memory group of" in said
    ours, mmap = (
        next(line for line in said.splitlines() if line.startswith(f"   {name}")) for name in ("edge-run  ", "llama")
    )
    assert (ours.count("\u2588"), mmap.count("\u2588")) == (demo_picture.BAR_COLUMNS, demo_picture.BAR_COLUMNS // 2)
    assert "2.5 tokens/s, 350 MiB read for each" in ours
    assert "edge-run made 2.0 times the tokens a second" in said


def test_mmap_that_takes_too_long_is_stopped(run: Run, played: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def slow(config: ModelConfig, on_tick: Callable[[float], None]) -> Measurement:
        on_tick(MMAP_SECONDS - 1 if config.backend == MMAP else 1e6)
        if config.backend == MMAP:
            on_tick(MMAP_SECONDS + 1)
        return samples.measurement(config.backend)

    played(slow)
    assert run() == 0
    said = capsys.readouterr().err
    assert "llama.cpp's mmap: it had not made 6 tokens after 40 s, and was stopped." in said
    assert "times the tokens" not in said


@pytest.mark.parametrize(
    ("ended", "code", "told"), [(MMAP, 0, "mmap: the kernel ended it"), (OURS, 4, "more than its budget")]
)
def test_who_has_too_little_memory(
    run: Run, played: Any, capsys: pytest.CaptureFixture[str], ended: str, code: int, told: str
) -> None:
    def killing(config: ModelConfig, on_tick: object) -> Measurement:
        if config.backend == ended:
            raise OutOfMemory(Path("model.gguf"), 1)
        return samples.measurement(config.backend)

    played(killing)
    assert run() == code
    assert told in capsys.readouterr().err


def test_other_tokens_are_an_error(run: Run, played: Any, capsys: pytest.CaptureFixture[str]) -> None:
    played(lambda config, on_tick: samples.measurement(config.backend, token_ids=(1, 2, len(config.backend))))
    assert run() == 6
    assert "DIFFERENT TOKENS" in capsys.readouterr().err


def test_without_a_memory_group_mmap_does_not_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cold_run, "OwnMemoryGroup", lambda limit: OwnMemoryGroup(limit, tmp_path))
    assert run() == 0
    assert "mmap does not run beside it: no memory group can be made here" in capsys.readouterr().err
    assert run("--no-mmap") == 0
    assert "mmap" not in capsys.readouterr().err


def test_a_model_of_ones_own_is_not_grown(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--size", "20MiB") == ConfigError.exit_code
    assert "leave out --size" in capsys.readouterr().err


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.999, 1.0])
def test_a_bar_is_as_long_as_its_shares(share: float) -> None:
    drawn = demo_picture.bar([("a", share), ("b", (1 - share) / 2), ("c", (1 - share) / 2)], 40)
    assert len(drawn) == 40
    assert drawn.count("a") == round(40 * share)
    assert abs(drawn.count("b") - drawn.count("c")) <= 1
    assert len(demo_picture.bar([("a", share)], 40)) == round(40 * share)


def test_places_are_those_of_the_plan() -> None:
    drawn, said = demo_picture.describe_places(samples.PLAN, demo_picture.PLAIN_MARKS).splitlines()
    assert drawn.strip() == "#" * 6 + "=" * 6 + "." * 36
    assert all(size in said for size in ("# 50 MiB", "= 50 MiB", ". 300 MiB"))


@pytest.mark.parametrize(
    ("encoding", "marks"),
    [("utf-8", demo_picture.MARKS), ("ascii", demo_picture.PLAIN_MARKS), (None, demo_picture.PLAIN_MARKS)],
)
def test_marks_are_those_that_a_terminal_can_write(encoding: str | None, marks: demo_picture.Marks) -> None:
    assert demo_picture.marks_for(encoding) == marks


def test_a_model_of_ones_own_runs_beside_mmap(kit: Path, tmp_path: Path) -> None:
    done = run_program("demo", "--model", kit, "--cache-dir", tmp_path, "-t", 1, "-n", 2)
    assert done.returncode == 0, done.stderr
    assert "2 tokens at" in done.stderr
    assert ("edge-run made" in done.stderr) or ("mmap does not run beside it" in done.stderr)


@pytest.mark.parametrize("failing", ["grow", "_stream"])
def test_a_demo_that_fails_leaves_a_model_only_where_it_says_so(
    failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise ConfigError("it fails")

    monkeypatch.setattr(module, failing, fail)
    assert app._run(["demo", "--size", "9MiB", "--keep", "--cache-dir", str(tmp_path)], Terminal()) == 2
    left = list(tmp_path.iterdir())
    assert bool(left) is (failing != "grow")
    for folder in left:
        assert f"Kept: edge-run {folder / 'demo.gguf'} --memory" in capsys.readouterr().err
