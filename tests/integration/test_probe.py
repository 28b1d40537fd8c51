"""`edge-run probe` from the command line: what it measures, prints, keeps, and leaves behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_run import Model, ModelConfig, plan
from edge_run.base.errors import NotSupported
from edge_run.base.profile import DeviceProfile, KernelSpeed, RepackedSpeed
from edge_run.cli import app
from edge_run.cli.shared.terminal import Terminal
from edge_run.devices.host.machine import Cores
from edge_run.devices.host.profile import KernelFigure, Measurements, ProfileStore, RepackedFigure
from edge_run.runtime.probing import kernels as kernels_module
from edge_run.runtime.probing import probe as probing
from edge_run.runtime.probing.kernels import measure_stop_s
from edge_run.runtime.probing.probe import probe, weight_kinds
from edge_run.runtime.probing.workload import measured_now, this_setup
from edge_run.tiers.gguf import read_gguf
from gguf_files import container, tensor
from program import ending
from quick_probe import QUICK
from served import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="disks are measured on Linux only")


class Kernels:
    """Stands in for the kernels; says which were measured."""

    def __init__(self) -> None:
        self.measured: list[tuple[str, int, int, int]] = []
        self.repacked: list[tuple[str, int, int, int]] = []
        self.repackable = ""
        self.unknown = ""
        self.interrupted_at = -1

    def measure_matmul(
        self, type_name: str, row_elements: int, tokens: int, threads: int, by_expert: bool = False
    ) -> KernelSpeed:
        if len(self.measured) == self.interrupted_at:
            raise KeyboardInterrupt
        if type_name == self.unknown:
            raise NotSupported(f"{type_name}: no kernel")
        self.measured.append((type_name, row_elements, tokens, threads))
        return KernelSpeed(type_name, row_elements, tokens, threads, by_expert, 1e9 * len(self.measured))

    def has_repacked_kernel(self, type_name: str, row_elements: int, by_expert: bool) -> bool:
        return type_name == self.repackable

    def measure_repacked(
        self, type_name: str, row_elements: int, tokens: int, threads: int, by_expert: bool = False
    ) -> tuple[KernelSpeed, RepackedSpeed]:
        kind = type_name, row_elements, tokens, threads, by_expert
        plain = self.measure_matmul(*kind)
        self.repacked.append(kind[:4])
        return plain, RepackedSpeed(*kind, 2e9, 4e9)

    def measure_attention(self, tokens: int, shape: object, **how: int) -> float:
        return 5e9 * tokens

    def measure_node_s(self, threads: int) -> float:
        return 3e-7


class Load:
    share = 0.0


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Kernels that take no time, disks that take little, and a machine without others on it."""
    kernels = Kernels()
    for name in ("measure_matmul", "measure_attention", "measure_node_s", "has_repacked_kernel", "measure_repacked"):
        monkeypatch.setattr(kernels_module, name, getattr(kernels, name))
    monkeypatch.setattr(kernels_module, "lacks_room", lambda tokens: False)
    monkeypatch.setattr(probing, "OtherLoad", Load)
    monkeypatch.setattr(Load, "share", 0.0)
    measure = functools.partial(probing.measure_disk, effort=QUICK)
    monkeypatch.setattr(probing, "measure_disk", lambda folder, model, readers, effort: measure(folder, model, readers))
    return kernels


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kernels: Kernels) -> Run:
    """Run the command line in this process, in a folder of its own: (exit code, standard output, standard error)."""
    for name in [name for name in os.environ if name.startswith("EDGE_RUN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments: object) -> tuple[int, str, str]:
        code = app._run(["probe", *map(str, arguments)], Terminal())
        return code, *capfd.readouterr()

    return run


def test_lines_without_a_terminal(run: Run, kernels: Kernels) -> None:
    code, out, err = run("-t", 2)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    names = ("processor: ", "memory: ", "attention: 5.0 GFLOP/s for one token, 2560.0 for many", "overhead: 0.30 us")
    assert all(line.startswith(name) for line, name in zip(lines[: len(names)], names, strict=True))
    assert f"disk {Path.cwd()}: device " in out
    assert "weights Q4_0, rows of 4,096: 1 token 954 MiB/s, 512 tokens 1.86 GiB/s" in lines
    assert len(kernels.measured) == 8


def test_json_is_the_profile(run: Run) -> None:
    code, out, err = run("--json", "-t", 2, "--readers", 3)
    assert (code, err) == (0, "")
    profile = json.loads(out)
    assert profile.keys() == set(DeviceProfile.__dataclass_fields__)
    (disk,) = profile["disks"]
    assert disk["folder"] == str(Path.cwd()), "the cache is on the same file system"
    assert [read["readers"] for read in disk["reads"]] == [3, 3, 3]
    assert profile["node_s"] == 3e-7
    assert 0 < profile["stop_s"] < 1


def test_tables_at_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_run.cli.shared.terminal._is_terminal", lambda stream: stream is sys.stdout)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("-t", 2)
    assert code == 0
    assert "Reading in blocks of each size, MiB/s\n" in out
    assert "128 KiB" in out
    assert any(line.split()[:5] == ["Q4_0,", "rows", "of", "4,096", "954"] for line in out.splitlines())
    assert max(map(len, out.splitlines())) <= 80


def test_it_is_measured_once(run: Run, kernels: Kernels) -> None:
    first = run("--json", "-t", 2)[1]
    kernels.measured.clear()
    assert run("--json", "-t", 2)[1] == first
    assert kernels.measured == []
    assert run("--json", "-t", 1)[0] == 0
    assert {threads for *_, threads in kernels.measured} == {1}
    kernels.measured.clear()
    again = json.loads(run("--json", "-t", 2, "--fresh")[1])
    assert len(kernels.measured) == 8
    assert again["disks"] != json.loads(first)["disks"]


def test_a_profile_has_the_cores_that_a_quota_leaves_time_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(probing.describe_machine(), cores=Cores(logical=16, physical=8, quota=2.5))
    monkeypatch.setattr(probing, "describe_machine", lambda: machine)
    profile = json.loads(run("-t", 2, "--json")[1])
    assert (profile["physical_cores"], profile["logical_cores"]) == (2, 2)


def test_repacked_weights_are_measured_where_they_have_a_kernel(run: Run, kernels: Kernels) -> None:
    kernels.repackable = "Q4_0"
    code, out, _ = run("-t", 2, "--json")
    assert code == 0
    assert kernels.repacked == [("Q4_0", 4096, 1, 2), ("Q4_0", 4096, 512, 2)]
    profile = json.loads(out)
    speeds = [(kernel["bytes_per_s"], kernel["repacked_bytes_per_s"]) for kernel in profile["repacked_kernels"]]
    assert speeds == [(2e9, 4e9), (2e9, 4e9)]
    assert len(profile["kernels"]) == 8
    assert run("-t", 2, "--json")[1] == out
    assert len(kernels.repacked) == 2, "measured once"
    assert kernels.measured.count(("Q4_0", 4096, 1, 2)) == 1, "with them"
    assert "weights repacked Q4_0, rows of 4,096: 1 token 1.86 GiB/s, 512 tokens 1.86 GiB/s" in run("-t", 2)[1]


def test_plain_weights_are_measured_again_beside_repacked_ones(kernels: Kernels, tmp_path: Path) -> None:
    """Speeds of another minute cannot be compared."""
    store = ProfileStore(tmp_path)
    speed = KernelSpeed("Q4_0", 4096, 1, 1, False, 5.0)
    store.save(this_setup(), Measurements(kernels=(KernelFigure(measured_now(), False, speed),)))
    kernels.repackable = "Q4_0"
    profile = probe([], None, ModelConfig(threads=1), store=store)
    assert [one.bytes_per_s for one in profile.kernels if one.type_name == "Q4_0" and one.tokens == 1] == [1e9]
    assert kernels.repacked == [("Q4_0", 4096, 1, 1), ("Q4_0", 4096, 512, 1)]


def test_a_model_adds_its_kinds_of_weights(run: Run, kernels: Kernels, grown: Path) -> None:
    run("-t", 2)
    kernels.measured.clear()
    code, out, _ = run("-t", 2, "--model", grown, "--json")
    assert code == 0
    assert {key[:2] for key in kernels.measured} == {kind[:2] for kind in weight_kinds(read_gguf(grown))}
    assert {tokens for _, _, tokens, _ in kernels.measured} == {1, 8, 16, 64, 512}
    profile = json.loads(out)
    assert len(profile["kernels"]) == 8 + len(kernels.measured)
    assert [disk["folder"] for disk in profile["disks"]] == [str(grown.parent)]


def test_the_model_is_read_and_no_scratch_file_written(
    kernels: Kernels, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_run.devices.host.disk.scratch_file", None)
    config = ModelConfig(cache_folder=tmp_path / "cache")
    profile = probe([], grown, config)
    assert profile.disks[0].bytes_per_s > 1e6


def test_kinds_of_weights(kit: Path, grown: Path) -> None:
    for path in (kit, grown):
        kinds = weight_kinds(read_gguf(path))
        assert 1 <= len(kinds) <= 4
        assert all(row % 32 == 0 and not name.startswith("F32") for name, row, _ in kinds)
        assert not any(by_expert for *_, by_expert in kinds)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_was_disturbed_counts_where_it_is_used(kernels: Kernels, tmp_path: Path, threads: int) -> None:
    store, speed = ProfileStore(tmp_path), RepackedSpeed("Q4_0", 4096, 1, 1, False, 2e9, 4e9)
    plain = KernelFigure(measured_now(), False, KernelSpeed("Q4_0", 4096, 1, 1, False, 1e9))
    repacked = RepackedFigure(measured_now(), True, speed, True)
    store.save(this_setup(), Measurements(kernels=(plain,), repacked=(repacked,)))
    profile = probe([], None, ModelConfig(threads=threads), store=store)
    assert (profile.is_disturbed, bool(store.problem)) == (threads == 1, threads == 1)


def test_rows_that_no_model_has_are_not_measured(tmp_path: Path) -> None:
    """128 rows of each kind are measured, in memory that a file of a few hundred bytes and a hole would choose."""
    path, shape = tmp_path / "long.gguf", (1 << 26, 1)
    path.write_bytes(container(tensors=tensor(b"output.weight", shape), n_tensors=1))
    os.truncate(path, path.stat().st_size + (4 << 26))
    assert weight_kinds(read_gguf(path)) == ()


def test_a_kind_without_a_kernel_is_passed_over(run: Run, kernels: Kernels) -> None:
    kernels.unknown = "Q4_K"
    code, out, _ = run()
    assert code == 0
    assert "Q4_K" not in out
    assert "F16" in out


def test_what_was_measured_before_ctrl_c_is_kept(run: Run, kernels: Kernels) -> None:
    kernels.interrupted_at = 3
    assert run("-t", 2) == (130, "", "")
    kernels.interrupted_at = -1
    assert run("-t", 2)[0] == 0
    assert len(kernels.measured) == 8
    assert list(Path.cwd().iterdir()) == []


def test_a_cache_that_cannot_be_written_is_said_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("--cache-dir", tmp_path / "file")
    assert code == 0
    assert out.startswith("processor: ")
    assert err == f"Note: {tmp_path}/file/profiles: cannot be written (Not a directory); measured again next time\n"


def test_a_busy_machine_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "share", 0.5)
    code, _, err = run()
    assert code == 0
    assert err.startswith("Note: other programs were at work")
    assert err.count("\n") == 1


def test_what_is_measured_where_memory_is_short_is_not_kept_for_long(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow passes: wide ones need little."""
    kernels.repackable = "Q4_0"
    monkeypatch.setattr(kernels_module, "lacks_room", lambda tokens: tokens == 1)
    store, config = ProfileStore(tmp_path), ModelConfig(threads=1, cache_folder=tmp_path)
    probe(config=config, store=store)
    assert store.problem.startswith("other programs were at work or took the memory")
    known = store.load(this_setup())
    for figure in (*known.kernels, *(one for one in known.repacked if one.is_there)):
        assert figure.is_disturbed == (figure.speed.tokens == 1)
    assert {figure.speed.tokens == 1 for figure in known.kernels} == {True, False}
    assert [figure.is_disturbed for figure in known.costs] == [True]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "nowhere: is no folder"),
        (["--model", "nowhere.gguf"], 3, "nowhere.gguf"),
        (["-t", "0"], 2, "threads 0"),
        (["--flash"], 2, "--flash"),
    ],
)
def test_what_cannot_be(run: Run, arguments: list[str], code: int, message: str) -> None:
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert err.startswith("edge-run: ")
    assert message in err
    assert err.count("\n") == 1


def test_real_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "USUAL_KINDS", (("Q8_0", 256, False),))
    monkeypatch.setattr(probing, "USUAL_TOKENS", (1,))
    monkeypatch.setattr(probing, "MANY_TOKENS", 16)
    monkeypatch.setattr(kernels_module, "has_repacked_kernel", lambda *kind: False)  # it has, on some processors
    steps: list[str] = []
    config = ModelConfig(threads=1, cache_folder=tmp_path / "cache")
    profile = probe([tmp_path], None, config, on_step=steps.append, effort=QUICK)
    assert [(kernel.type_name, kernel.row_elements, kernel.tokens) for kernel in profile.kernels] == [("Q8_0", 256, 1)]
    assert 1e7 < profile.kernels[0].bytes_per_s < 1e12
    assert all(1e7 < speed < 1e15 for speed in profile.attention_flops_per_s)
    assert profile.node_s > 0
    assert steps == [
        f"Reading from the disk of {tmp_path}",
        "Multiplying Q8_0, rows of 256, 1 token (1 of 1)",
        "Attention, nodes and stops",
    ]
    assert probe([tmp_path], None, config, effort=QUICK) == profile


def test_a_stop_costs_microseconds() -> None:
    assert 1e-8 < measure_stop_s(1) < 1e-3


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_stopped_leaves_nothing(tmp_path: Path, end: signal.Signals) -> None:
    here = tmp_path / "here"
    here.mkdir()
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "edge_run", "probe", str(here)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ending(subprocess.Popen(command, env=environment, **pipes)) as process:

        def has_scratch_file() -> bool:
            assert process.poll() is None, process.communicate()
            links = []
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    links.append(os.readlink(entry))
            return any(link.startswith(f"{here}/") and link.endswith(" (deleted)") for link in links)

        wait_for(has_scratch_file)
        process.send_signal(end)
        out, err = process.communicate(timeout=100)
    assert list(here.iterdir()) == []
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert (process.returncode, out, err) == (expected[end], "", "")


def test_an_open_model_has_a_forecast_once_the_device_was_measured(kernels: Kernels, kit: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"context_tokens": 256, "threads": 1, "cache_folder": tmp_path / "cache", "sequences": 3}
    with Model(kit, **options) as model:
        assert model.forecast() is None
        probe([], kit, ModelConfig(**options))
        found = model.forecast(64)
        planned = plan(kit, prompt_tokens=64, profile=probing.recall(read_gguf(kit), ModelConfig(**options)), **options)
    assert found is not None
    assert planned.forecast is not None
    assert (found.prompt_tokens, found.parallel) == (64, 3)
    assert found.parallel_tokens_per_s == pytest.approx(planned.forecast.parallel_tokens_per_s, rel=0.05)
