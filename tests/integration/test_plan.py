"""`edge-run plan` and `edge_run.plan`: what they say, what they refuse, and that what a run shows comes from them."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edge_run
from bench_samples import PLAN, PROFILE
from edge_run import BudgetError, ConfigError, ContextFull, Model
from edge_run.base.profile import DeviceProfile, RepackedSpeed
from edge_run.base.results import Plan, Progress
from edge_run.base.units import GIB, MIB
from edge_run.cli import app
from edge_run.cli.commands.plan import _measured
from edge_run.cli.reports import forecasts
from edge_run.cli.shared import figures
from edge_run.cli.shared.terminal import Terminal
from edge_run.runtime.bench import bench
from edge_run.runtime.forecasting.abreast import USUAL_PARALLEL, Abreast
from edge_run.runtime.forecasting.forecast import pass_work
from edge_run.runtime.gpu import devices
from edge_run.runtime.planning import micro_batch, prepare
from edge_run.runtime.planning import planner as planner_module
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.planning.planner import abreast, packed
from edge_run.runtime.probing import probe as probing
from edge_run.tiers.source import SourceFile
from kit_models import streamed
from known_device import know_device
from program import WAIT_S, run_program, run_source
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}
FLAGS = ("-c", "256", "-ub", "16", "-t", "1")
Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]


@pytest.fixture
def run(environment: dict[str, str], known_models: None) -> Run:
    environment = {**environment, "COLUMNS": "120"}

    def run(*arguments: object, timeout_s: float = WAIT_S) -> Result:
        return run_program("plan", *arguments, environment=environment, timeout_s=timeout_s)

    return run


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with what is found out about models, and with no speeds of this device."""
    return tmp_path_factory.mktemp("known")


def test_without_a_probe_it_says_where_every_byte_goes(run: Run, grown: Path) -> None:
    done = run(grown, *FLAGS, "--memory", "160MiB", "--no-probe")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("grown.gguf: llama, 120 MiB in ")
    assert "Inside 160 MiB it is streamed; the smallest budget that works with passes of " in done.stdout
    for what in ("program", "kv", "buffers", "work", "reserve", "pinned", "window", "in all"):
        assert f"\n   {what} " in done.stdout
    assert "Expected" not in done.stdout


def test_json_is_the_plan(run: Run, grown: Path) -> None:
    done = run(grown, *FLAGS, "--memory", "160MiB", "--no-probe", "--json")
    found = json.loads(done.stdout)
    assert (found["mode"], found["budget_bytes"], found["forecast"]) == ("streamed", 160 * MIB, None)
    assert sum(item["size_bytes"] for item in found["items"]) <= 160 * MIB


def test_several_answers_at_once_are_planned_as_they_are_served(run: Run, grown: Path, tmp_path: Path) -> None:
    done = run(grown, *FLAGS, "--memory", "160MiB", "--no-probe", "--json", "--parallel", 4, "--cache-dir", tmp_path)
    wanted = edge_run.plan(grown, memory="160MiB", sequences=4, cache_folder=tmp_path, **OPTIONS)
    assert json.loads(done.stdout) == json.loads(edge_run.to_json(wanted))


MEASURED_QUICKLY = """
import sys
sys.path.insert(0, {tests!r})
from edge_run.cli import main
from edge_run.runtime.probing import probe, workbench
from quick_probe import QUICK

measure = probe.measure_disk
probe.measure_disk = lambda folder, model, readers, effort: measure(folder, model, readers, QUICK)
probe.MODEL_TOKENS, workbench.ENOUGH_S, workbench.TOO_LONG_S = (1, 64), 0.02, 0.02
main({words!r})
"""


def test_with_a_probe_it_says_how_long_it_takes_and_remembers_the_device(
    environment: dict[str, str], known_models: None, kit: Path
) -> None:
    """What it measures is real, but two widths of passes, and for a moment each."""
    words = [str(word) for word in ("plan", kit, *FLAGS, "--memory", "4GiB", "--prompt-tokens", 32)]
    source = MEASURED_QUICKLY.format(tests=str(Path(__file__).parents[1]), words=words)
    first, again = (run_source(source, environment=environment) for _ in range(2))
    assert "Measuring this device" in first.stderr
    assert again.stderr == ""
    for done in (first, again):
        assert done.returncode == 0
        lines = done.stdout.partition("Expected on this device:\n")[2].splitlines()
        assert [line.split("  ")[0].strip() or line.split()[0] for line in lines[:1]] == ["opening"]
        assert any(line.startswith("   answer") and "tokens/s" in line for line in lines)


def test_the_first_plan_of_a_device_is_decided_by_what_it_measured(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the second one is, which finds it measured: here the width of passes."""
    measure = probing.probe

    def probe(*given: Any, **named: Any) -> DeviceProfile:
        know_device(tmp_path, grown)
        return measure(*given, **named)

    def text_s(
        prepared: prepare.Prepared, plan: Plan, n_tokens: int, width: int, profile: DeviceProfile | None
    ) -> float:
        return 1.0 if width == (128 if profile else 32) else 2.0

    monkeypatch.setattr(probing, "probe", probe)
    monkeypatch.setattr(micro_batch, "text_s", text_s)
    monkeypatch.setattr(micro_batch, "SMALL_SHARE", 0)  # so that all widths are weighed
    words = ["plan", grown, "--memory", "160MiB", "-c", 1024, "--repack", "off", "--cache-dir", tmp_path, "--json"]
    plans = []
    for _ in range(2):
        assert app._run([str(word) for word in words], Terminal()) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert [plan["micro_batch_tokens"] for plan in plans] == [128, 128]
    assert plans[0] == plans[1]


def test_a_prompt_must_fit_the_context_of_the_plan_that_is_told(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the device is measured it may be another one."""
    words = ["plan", kit, "--memory", "4GiB", "-ub", 16, "-t", 1, "--cache-dir", tmp_path, "--prompt-tokens", 300]
    for contexts, code in (((256, 512), 0), ((512, 256), 8)):
        left = iter(contexts)
        monkeypatch.setattr(
            "edge_run.runtime.planning.plan.planner",
            lambda path, config, left=left, **how: planner(path, replace(config, context_tokens=next(left)), **how),
        )
        monkeypatch.setattr("edge_run.cli.commands.plan._known", lambda planned: None)
        monkeypatch.setattr("edge_run.cli.commands.plan._measured", lambda *given: PROFILE)
        assert app._run([*map(str, words), "--json"], Terminal()) == code
    told = capsys.readouterr()
    assert json.loads(told.out)["context_tokens"] == 512
    assert "does not fit the context of 256" in told.err


def test_a_sweep_is_a_table(run: Run, grown: Path) -> None:
    done = run(grown, *FLAGS, "--sweep", "--no-probe")
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["budget", "mode", "pinned", "read", "per", "token", "first", "token", "prompt", "answer"]
    assert [row.split()[2] for row in rows] == ["streamed"] * (len(rows) - 1) + ["resident"]
    plans = json.loads(run(grown, *FLAGS, "--sweep", "--no-probe", "--json").stdout)["plans"]
    assert [plan["mode"] for plan in plans] == [row.split()[2] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["missing.gguf"], 3, "missing.gguf: cannot open"),
        (["{grown}", "--memory", "20MiB"], 4, "it needs at least "),
        (["{grown}", "--memory", "lots"], 2, "not a size"),
        (["{grown}", "--prompt-tokens", "0"], 2, "--prompt-tokens"),
        (["{grown}", "-c", "256", "--prompt-tokens", "300"], 8, "does not fit the context of 256; give more with -c"),
        (["{grown}", "--sweep", "--prompt-tokens", "1" + "0" * 15], 8, "does not fit the context of "),
    ],
)
def test_refusals_are_one_line(run: Run, grown: Path, arguments: list[str], code: int, told: str) -> None:
    done = run(*(argument.format(grown=grown) for argument in arguments), "--no-probe")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert told in done.stderr


def test_from_python(grown: Path, known: Path) -> None:
    options = {**OPTIONS, "cache_folder": known}
    bare = edge_run.plan(grown, memory="160MiB", **options)
    assert (bare.mode, bare.forecast) == ("streamed", None)
    timed = edge_run.plan(grown, memory="160MiB", profile=PROFILE, prompt_tokens=100, **options)
    assert timed.forecast
    assert timed.forecast.prompt_tokens == 100
    assert timed.forecast.first_token_s > 0
    assert "tokens/s" in forecasts.describe(timed, 16, 80)
    usual = edge_run.plan(grown, memory="160MiB", profile=PROFILE, **options)
    assert usual.forecast
    assert usual.forecast.prompt_tokens == 255, "an answer has a token too"
    with pytest.raises(BudgetError):
        edge_run.plan(grown, memory="20MiB", **options)
    with pytest.raises(ConfigError):
        edge_run.plan(grown, config=edge_run.ModelConfig(), context_tokens=3)


@pytest.mark.parametrize("profile", [None, PROFILE])
def test_a_prompt_from_python_is_checked_as_that_of_the_command(
    grown: Path, known: Path, profile: DeviceProfile | None
) -> None:
    options = {**OPTIONS, "memory": "160MiB", "cache_folder": known, "profile": profile}
    for prompt_tokens in (256, 100_000):
        with pytest.raises(ContextFull, match=f"a prompt of {prompt_tokens} tokens does not fit the context of 256"):
            edge_run.plan(grown, prompt_tokens=prompt_tokens, **options)
    for prompt_tokens in (0, -5):
        with pytest.raises(ConfigError, match=f"prompt of {prompt_tokens} tokens: must be at least 1"):
            edge_run.plan(grown, prompt_tokens=prompt_tokens, **options)


def test_without_the_speed_of_any_kernel_there_are_no_times(grown: Path, known: Path) -> None:
    """As of a model whose rows are all too long to be measured."""
    profile = replace(PROFILE, kernels=())
    bare = edge_run.plan(grown, memory="160MiB", profile=profile, cache_folder=known, **OPTIONS)
    assert bare.forecast is None


def test_a_gpu_that_the_run_leaves_alone_is_not_looked_at(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be full: by `plan`, which measures the first time, and by `bench`, which asks each time."""

    class Enough(Exception):
        pass

    def end(*given: object) -> None:
        raise Enough

    know_device(tmp_path, grown)
    config = edge_run.ModelConfig(memory="160MiB", context_tokens=256, micro_batch_tokens=16, cache_folder=tmp_path)
    monkeypatch.setattr(devices, "find_gpus", lambda: pytest.fail("it is looked at"))
    profile = _measured(planner(grown, config), grown, Terminal())
    assert profile
    assert (bool(profile.kernels), profile.gpus) == (True, ())
    monkeypatch.setattr(bench, "ColdRuns", end)
    with pytest.raises(Enough):
        bench.Bencher(grown, config, bench.Task()).run()


def test_as_many_at_once_as_make_the_most_tokens(grown: Path, known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = edge_run.ModelConfig(memory="160MiB", sequences=0, cache_folder=known, **OPTIONS)
    unknown = planner(grown, config)
    assert unknown.config.sequences == USUAL_PARALLEL
    timed = unknown.timed(unknown.plan(), PROFILE, 100).forecast
    assert timed
    assert timed.parallel == USUAL_PARALLEL
    assert timed.parallel_tokens_per_s > timed.decode_tokens_per_s
    assert forecasts.abreast(timed).startswith("16 answers at once make ")
    monkeypatch.setattr(prepare, "_recalled", lambda prepared: PROFILE)
    assert planner(grown, config).config.sequences == abreast(unknown, unknown.plan(), PROFILE).best


@pytest.mark.parametrize(("budget", "context_tokens", "chosen"), [(160, 2048, 24), (160, 256, 16), (104, 512, 16)])
def test_more_at_once_need_room_for_their_texts_and_a_window_as_wide(
    grown: Path, known: Path, monkeypatch: pytest.MonkeyPatch, budget: int, context_tokens: int, chosen: int
) -> None:
    hoped = Abreast(replace(PLAN, micro_batch_tokens=64), lambda *of_pass: 1.0, 0, most=24, request_tokens=16)
    assert hoped.best == 24
    monkeypatch.setattr(prepare, "_abreast", lambda prepared: hoped)
    options = {**OPTIONS, "micro_batch_tokens": 64, "context_tokens": context_tokens, "request_tokens": 16}
    config = edge_run.ModelConfig(memory=budget * MIB, sequences=0, cache_folder=known, **options)
    assert planner(grown, config).config.sequences == chosen


def test_more_at_once_do_not_shorten_a_context_that_nobody_asked_for(
    grown: Path, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that has room beside the usual number may be longer than what requests usually have."""
    hoped = Abreast(replace(PLAN, micro_batch_tokens=64), lambda *of_pass: 1.0, 0, most=24, request_tokens=16)
    assert hoped.best == 24
    monkeypatch.setattr(prepare, "_abreast", lambda prepared: hoped)
    monkeypatch.setattr(
        prepare._Opening, "_usual_tokens", lambda opening, asked: 2048 if asked.sequences <= USUAL_PARALLEL else 1024
    )
    options = {**OPTIONS, "micro_batch_tokens": 64, "context_tokens": None, "request_tokens": 16}
    config = edge_run.ModelConfig(memory="160MiB", sequences=0, cache_folder=known, **options)
    found = planner(grown, config)
    assert (found.config.sequences, found.known.context_tokens) == (24, 2048)


def test_a_budget_that_does_not_suffice_for_the_usual_number_is_for_fewer(
    grown: Path, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_real = prepare._Opening.prepare

    def refuse(opening: prepare._Opening, asked: edge_run.ModelConfig) -> prepare.Prepared:
        if asked.sequences > 8:
            raise BudgetError("memory budget: too small for so many")
        return prepare_real(opening, asked)

    monkeypatch.setattr(prepare._Opening, "prepare", refuse)
    config = edge_run.ModelConfig(memory="160MiB", sequences=0, cache_folder=known, request_tokens=16, **OPTIONS)
    assert planner(grown, config).config.sequences == 8
    long = replace(config, request_tokens=128)
    assert planner(grown, long).config.sequences == 2, "as many as have room for their texts"


def test_a_budget_that_does_not_suffice_for_many_answers_is_for_one(
    grown: Path, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(prepared: prepare.Prepared) -> None:
        raise BudgetError("memory budget: too small for so many")

    monkeypatch.setattr(prepare, "_abreast", refuse)
    config = edge_run.ModelConfig(memory="160MiB", sequences=0, cache_folder=known, **OPTIONS)
    assert planner(grown, config).config.sequences == 1


def test_it_says_what_a_packed_file_would_gain(grown: Path, known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights stream that a packed file would have repacked, and readers take long to repack."""
    monkeypatch.setattr(planner_module, "disk_of", lambda profile, path: profile.disks[0])
    config = edge_run.ModelConfig(memory="100MiB", sequences=16, repack="on", cache_folder=known, **OPTIONS)
    planned = planner(grown, config)
    work = pass_work(planned.gguf, planned.known.graph, 0)
    kernels = tuple(
        RepackedSpeed(type_name, int(elements), tokens, 1, False, 2e9, 1e9)
        for type_name, _, elements in sorted({matmul.kind.partition("/") for matmul in work.matmuls})
        for tokens in (1, 64)
    )
    profile = replace(PROFILE, repacked_kernels=kernels, logical_cores=1)
    plan = planned.timed(planned.plan(), profile, 100)
    assert plan.repacked
    assert not plan.read_repacked
    found = packed(planned, plan)
    assert found
    with_file = found[0].timed(found[1], profile, 100)
    assert with_file.read_repacked
    assert plan.forecast
    assert with_file.forecast
    assert with_file.forecast.parallel_tokens_per_s > 1.1 * plan.forecast.parallel_tokens_per_s
    told = figures.describe_packing(Path("/my models/m.gguf"), 3 * GIB, plan.forecast, with_file.forecast)
    assert "`edge-run pack '/my models/m.gguf'` once, which writes about 3.00 GiB beside it" in told
    assert "16 answers at once" in told
    assert figures.describe_packing(Path("m.gguf"), 3 * GIB, plan.forecast, plan.forecast) == ""
    for settings in ({"repack": "off"}, {"packed": "off"}):
        assert packed(planner(grown, replace(config, **settings)), plan) is None
    tight = replace(plan, budget_bytes=plan.minimum_bytes - MIB)
    assert packed(planned, tight) is None, "it has no room"


def test_a_run_says_how_far_it_is(grown: Path, known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from another thread, which each read waits for, in seconds once the device is known."""
    seen: list[Progress] = []
    is_over, has_looked = threading.Event(), threading.Event()
    read_pieces = SourceFile.read_pieces

    def read_when_seen(source: SourceFile, pieces: Sequence[tuple[int, int]], offset: int) -> int:
        has_looked.clear()
        has_looked.wait(10)
        return read_pieces(source, pieces, offset)

    with Model(grown, cache_folder=known, **streamed()) as model:
        assert model.progress is None
        model.expect(PROFILE)
        monkeypatch.setattr(SourceFile, "read_pieces", read_when_seen)

        def look() -> None:
            while not is_over.wait(0.001):
                if progress := model.progress:
                    seen.append(progress)
                has_looked.set()

        watcher = threading.Thread(target=look)
        watcher.start()
        model.generate(list(range(5, 85)), max_tokens=1, temperature=0).result()
        is_over.set()
        watcher.join()
        assert model.progress is None
        assert seen[0].stage == "reading"
        shares = [progress.share for progress in seen if progress.all_tokens == 80]
        assert shares == sorted(shares)
        assert shares[-1] > 0.5
        assert all(progress.remaining_s is not None for progress in seen)
        assert "of weights for the first time" in figures.describe_wait(model.plan, seen[0])
        assert "about" in figures.describe_wait(model.plan, seen[-1])


def test_showing_at_no_terminal_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal().showing(lambda: "never") as stop:
        stop()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "least", "most"), [("gemma3", 0.6, 0.9), ("llama", 0.0, 0.0), ("qwen3next", 0.0, 0.0)]
)
def test_layers_with_a_sliding_window_are_known(name: str, least: float, most: float, tmp_path: Path) -> None:
    config = edge_run.ModelConfig(context_tokens=4096, micro_batch_tokens=64, cache_folder=tmp_path / "cache")
    known = planner(make_model(name, tmp_path), config).known
    assert least <= known.windowed_share <= most
    assert bool(known.window_tokens) == bool(most)
