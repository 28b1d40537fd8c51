"""Predictions beside measurements, in figures, words and pictures; nothing is measured."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bench_samples as samples
from edge_run.base.bench import MMAP
from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, EdgeRunError, NotSupported, TierReadError
from edge_run.base.strict_json import to_json
from edge_run.base.units import MIB
from edge_run.cli.reports import bench_plot, bench_table
from edge_run.cli.shared import plot_file
from edge_run.devices.host.scratch import scratch_file
from edge_run.runtime.bench import bench as module
from edge_run.runtime.bench import memory_group
from edge_run.runtime.bench.bench import Bencher, Task, arbitrary_tokens
from edge_run.runtime.bench.cold_run import ColdRuns, drop_from_page_cache, parse_measurement, read_ahead_bytes
from edge_run.runtime.bench.comparison import COMPARED, compare, same_tokens
from edge_run.runtime.bench.memory_group import PREFIX, OwnMemoryGroup

BOTH = samples.measurement(), samples.measurement(MMAP)


def test_medians_spread_deviation_and_ratio() -> None:
    slower = samples.measurement(decode_tokens_per_s=1.5)
    decode = next(c for c in compare(samples.PLAN, (*BOTH, slower)) if c.name == "decode_tokens_per_s")
    assert decode.measured is not None
    assert (decode.measured.median, decode.measured.least, decode.measured.most) == (2.0, 1.5, 2.5)
    assert decode.measured.half_range == 0.25
    assert (decode.predicted, decode.deviation, decode.ratio) == (2.0, 0.0, 2.0 / 1.25)


def test_what_cannot_be_compared_is_none() -> None:
    ours = samples.measurement(bytes_per_token=0.0)
    mmap = samples.measurement(MMAP, bytes_per_token=None, bytes_read=None)
    plan = replace(samples.PLAN, forecast=None, streamed_bytes_per_pass=0)
    found = {comparison.name: comparison for comparison in compare(plan, [ours, mmap])}
    assert tuple(found) == COMPARED
    read = found["bytes_per_token"]
    assert (read.predicted, read.deviation, read.mmap, read.ratio) == (0, None, None, None)
    assert found["load_s"].predicted is None
    assert found["peak_bytes"].predicted == 190 * MIB
    assert compare(plan, [ours])[0].mmap is None


def test_same_tokens_under_one_numerics_key() -> None:
    assert same_tokens(BOTH)
    assert same_tokens([*BOTH, samples.measurement(token_ids=(1, 2, 4))]) is False
    assert same_tokens([*BOTH, samples.measurement(numerics=replace(samples.NUMERICS, threads=2))]) is False
    assert same_tokens(BOTH[:1]) is None


def test_tokens_of_repacked_weights_are_compared_with_each_other_alone() -> None:
    repacked = replace(samples.NUMERICS, repacked="Q4_0/4096")
    other = samples.measurement(token_ids=(1, 2, 4), numerics=repacked)
    assert same_tokens([*BOTH, other]) is None
    assert same_tokens([other, other]) is True
    assert same_tokens([*BOTH, other, samples.measurement(numerics=repacked)]) is False
    of_llama_cpp = samples.measurement(MMAP, numerics=replace(samples.NUMERICS, use_extra_bufts=True))
    assert same_tokens([BOTH[0], of_llama_cpp]) is None, "a file with nothing to repack"


def test_what_a_child_writes_is_read_again() -> None:
    assert parse_measurement(to_json(BOTH[1])) == BOTH[1]
    assert json.loads(to_json(samples.bench(*BOTH)))["comparisons"][0]["name"] == "load_s"


@pytest.mark.parametrize(
    ("first", "then", "told"), [(64, 256, "it goes on"), (256, 64, "do not fit the context of 64")]
)
def test_a_prompt_must_fit_the_context_that_is_run_with(
    first: int, then: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured of the device may decide it."""
    config, contexts = ModelConfig(memory="1GiB", cache_folder=tmp_path), iter((first, then))

    def go_on() -> None:
        raise ConfigError("it goes on")

    def planned(path: Path, config: ModelConfig) -> Any:
        known = SimpleNamespace(context_tokens=next(contexts))
        return SimpleNamespace(known=known, config=config, plan=go_on, timed=None)

    monkeypatch.setattr(module, "planner", planned)
    with pytest.raises(EdgeRunError, match=told):
        Bencher(tmp_path / "model.gguf", config, Task(100, 8)).run(samples.PROFILE)
    assert not list(contexts)


def test_a_child_is_told_all_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[bytes] = []

    def run(self: ColdRuns, request: bytes, on_tick: object) -> tuple[int, bytes, str]:
        requests.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(ColdRuns, "_run_child", run)
    (tmp_path / "a.gguf").touch()
    config = ModelConfig(also=tmp_path / "b.gguf", cache_folder=tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        ColdRuns([tmp_path / "a.gguf"], 0).run(config, [1], 1, lambda seconds: None)
    told = ModelConfig(**json.loads(requests[0])["config"])
    for field in dataclasses.fields(config):
        assert str(getattr(told, field.name)) == str(getattr(config, field.name)), field.name


def test_arbitrary_tokens_are_of_the_vocabulary_and_always_the_same() -> None:
    tokens = arbitrary_tokens(500, 1000)
    assert tokens == arbitrary_tokens(500, 1000)
    assert len(set(tokens)) == 500
    assert all(0 <= token < 1000 for token in tokens)


def test_table_where_it_fits_and_lines_where_it_does_not() -> None:
    bench = samples.bench(*BOTH, samples.measurement(decode_tokens_per_s=1.5), samples.measurement(MMAP))
    table = bench_table.describe(bench, 120)
    head = next(line for line in table.splitlines() if "predicted" in line)
    row = next(line for line in table.splitlines() if line.startswith("decode"))
    assert re.fullmatch(r"decode +2 tokens/s +2 tokens/s ±25% +\+0% +1\.25 tokens/s +1\.60", row)
    assert len(row) == len(head)
    for columns in (40, None):
        line = next(line for line in bench_table.describe(bench, columns).splitlines() if line.startswith("decode: "))
        assert line.endswith("tokens/s ±25%, difference +0%, llama.cpp mmap 1.25 tokens/s, ratio 1.60")
    assert "memory group of 200 MiB" in table
    assert "reading decides" in table
    assert "same in all 4 runs" in table


def test_table_says_what_was_not_fair() -> None:
    bench = samples.bench(
        samples.measurement(),
        samples.measurement(MMAP, bytes_read=MIB),
        box=samples.MemoryBox(0, "no memory group can be made here (Permission denied)", 0),
        mmap_problem="the kernel ended it",
        profile_problem="others were at work",
    )
    text = bench_table.describe(bench, 120)
    assert "mmap had all of the page cache: no memory group can be made here (Permission denied)." in text
    assert "read only 1 MiB from storage" in text
    assert "the kernel ended it" in text
    assert "others were at work" in text
    alone = bench_table.describe(samples.bench(samples.measurement()), 120)
    assert "mmap" not in alone
    assert "ratio" not in alone


@pytest.mark.parametrize("name", ["model.gguf", "a$b$_^{.gguf", "語" * 100, "caf\udce9.gguf"])
def test_picture_is_a_png_and_nothing_else_is_left(tmp_path: Path, name: str) -> None:
    plot = plot_file.check_plot(tmp_path / "picture.png")
    path = plot.path
    assert not list(tmp_path.iterdir())
    drawn = samples.bench(*BOTH, samples.measurement(decode_tokens_per_s=1.0), model=name)
    plot_file.write_figure(plot, lambda figure: bench_plot.draw(drawn, figure))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert 800 < width < 3000
    assert 400 < height < 2000
    assert 10_000 < len(data) < 1_000_000
    assert list(tmp_path.iterdir()) == [path]


def test_picture_of_edge_run_alone_replaces_a_file_where_it_may(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")
    alone = samples.bench(samples.measurement())
    with pytest.raises(
        ConfigError, match=r"--plot .*picture\.png: exists; choose another name, or replace it with is_overwritten"
    ):
        plot_file.check_plot(path)
    plot = plot_file.check_plot(path, is_replacing=True)
    plot_file.write_figure(plot, lambda figure: bench_plot.draw(alone, figure))
    assert path.stat().st_size > 10_000


def test_picture_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")

    def full(figure: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(TierReadError, match="No space left"):
        plot_file.write_figure(plot_file.PlotFile(path, is_replacing=True), full)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("picture.png", "old")]


def test_pictures_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match=r"must be a PNG"):
        plot_file.check_plot(tmp_path / "picture.svg")
    with pytest.raises(ConfigError, match="is no file"):
        plot_file.check_plot(tmp_path / "folder.png")
    with pytest.raises(TierReadError, match="cannot be written"):
        plot_file.check_plot(tmp_path / "nowhere" / "picture.png")
    monkeypatch.setattr(plot_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotSupported, match=r"pip install 'edge-run\[plot\]'"):
        plot_file.check_plot(tmp_path / "picture.png")


def test_read_ahead(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    place = tmp_path / f"sys/class/bdi/{os.major(device)}:{os.minor(device)}"
    assert read_ahead_bytes(tmp_path, tmp_path) == 0
    place.mkdir(parents=True)
    (place / "read_ahead_kb").write_text("128\n")
    assert read_ahead_bytes(tmp_path, tmp_path) == 131072


def test_a_partition_is_read_ahead_of_as_its_disk_is(tmp_path: Path) -> None:
    device, disk = tmp_path.stat().st_dev, tmp_path / "sys/devices/disk"
    for folder in (disk / "partition", disk / "queue", tmp_path / "sys/dev/block"):
        folder.mkdir(parents=True)
    number = f"{os.major(device)}:{os.minor(device)}"
    (tmp_path / "sys/dev/block" / number).symlink_to("../../devices/disk/partition")
    assert read_ahead_bytes(tmp_path, tmp_path) == 0
    (disk / "queue/read_ahead_kb").write_text("256\n")
    assert read_ahead_bytes(tmp_path, tmp_path) == 262144


def is_cached(descriptor: int, offset: int) -> bool:
    """Return whether the page cache has a page of a file; the test is skipped where the system does not tell."""
    try:
        return os.preadv(descriptor, [bytearray(4096)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except (OSError, AttributeError):
        pytest.skip("this system does not tell what is in the page cache")


def test_dropped_pages_are_read_from_storage_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    descriptor = os.open(path, os.O_RDWR)
    try:
        drop_from_page_cache([path])
        if is_cached(descriptor, 1 << 19):
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            assert is_cached(descriptor, 1 << 19), "this file system would have let them go"
            pytest.skip("this file system keeps its pages")
    finally:
        os.close(descriptor)


def fake_group(root: Path, path: str, controllers: str, **files: str) -> Path:
    """Make a version 2 group; the kernel's own files do not appear in those that are made inside."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.subtree_control").write_text(controllers)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_a_file_system_that_drops_no_pages_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    path = tmp_path / "file"
    path.write_bytes(b"content")
    drop_from_page_cache([path])
    with scratch_file(tmp_path, 1 << 20) as source:
        assert source.size_bytes == 1 << 20


def test_no_memory_group_where_there_are_no_groups(tmp_path: Path) -> None:
    group = OwnMemoryGroup(MIB, tmp_path)
    assert group.reason.startswith("no memory group can be made here")
    assert group.renew() is None
    assert group.kills == 0
    group.close()


def test_memory_group_is_made_in_the_nearest_group_that_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_group, "_REMOVAL_TRIES", 1)  # only the kernel removes a folder with files in it
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    fake_group(tmp_path, "", "memory")
    outer = fake_group(tmp_path, "outer", "cpu memory", io_max="8:0 rbps=1", memory_max="max")
    fake_group(tmp_path, "outer/inner", "", io_max="", cpu_max="max 100000", memory_max="max")
    group = OwnMemoryGroup(MIB, tmp_path)
    folder = outer / f"{PREFIX}{os.getpid()}"
    assert group.reason == ""
    assert (folder / "memory.max").read_text() == str(MIB)
    assert (folder / "cgroup.procs").exists()
    (folder / "memory.events").write_text("max 5\noom 2\noom_kill 2\n")
    assert group.kills == 2


@pytest.mark.parametrize("limits", [{"io_max": "8:0 rbps=1"}, {"cpu_max": "5 10"}, {"memory_max": "4096"}])
def test_no_memory_group_that_would_lead_out_of_other_limits(tmp_path: Path, limits: dict[str, str]) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    fake_group(tmp_path, "", "memory")
    outer = fake_group(tmp_path, "outer", "memory io")
    fake_group(tmp_path, "outer/inner", "", **limits)
    group = OwnMemoryGroup(MIB, tmp_path)
    assert "none was given" in group.reason
    assert not list(outer.glob(f"{PREFIX}*"))
