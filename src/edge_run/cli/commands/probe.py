"""`edge-run probe`: what this device can do, measured once and kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_run.base.profile import DeviceProfile, DiskProfile, GpuProfile, KernelSpeed
from edge_run.base.units import MIB, format_count, format_size
from edge_run.cli.shared.answer import NOTICE
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings import model_config, report
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal


@click.command(
    cls=SettingsCommand,
    params=some_settings("threads", "readers", "cache_dir", "json", "verbose"),
    short_help="Measure this device: disks, cores, memory.",
)
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=PATH)
@click.option("--model", type=PATH, metavar="FILE", help="Measure what this model needs.")
@click.option("--fresh", is_flag=True, help="Measure again what is known already.")
@click.pass_context
def probe(context: click.Context, /, folders: tuple[Path, ...], model: Path | None, fresh: bool, **given: Any) -> None:
    """Measure what this device can do: its disks (that of each FOLDER), its cores on llama.cpp's kernels, its GPUs.

    Takes seconds, and what was measured is kept for 30 days. With a model, its disk is measured and no other unless
    named: by reading it, where it has 64 MiB or more. Else a file of up to 256 MiB, an eighth of what is free at
    most, is written for a moment: beside the model, or without one on the disks of the current folder and of the cache
    unless others are named.
    """
    terminal: Terminal = context.obj
    config = model_config(context, given)
    report(context, terminal, config)
    if not folders and model is None:
        folders = tuple(_default_folders(config.cache))
    from edge_run.devices.host.profile import ProfileStore
    from edge_run.runtime.probing.probe import probe as measure

    store = ProfileStore(config.cache)

    def show(text: str) -> None:
        terminal.show(f"{text} (Ctrl-C stops)")

    profile = measure(folders, model, config, is_fresh=fresh, on_step=show, store=store)
    terminal.write_result(profile, given["json"], _as_tables if terminal.shows_answer else _as_lines)
    if store.problem:
        terminal.say(f"Note: {store.problem}")
    elif terminal.shows_notices and not given["json"]:
        terminal.say("Kept for 30 days; --fresh measures again.", NOTICE)


def _default_folders(cache_folder: Path) -> Iterator[Path]:
    """Yield the current folder and the cache's, those where a file can be written."""
    with contextlib.suppress(OSError):
        cache_folder.mkdir(parents=True, exist_ok=True)
    for folder in (Path.cwd(), cache_folder):
        if folder.is_dir() and os.access(folder, os.W_OK):
            yield folder


@dataclass(frozen=True, slots=True)
class _Table:
    """Figures of one kind: a cell is a text or bytes a second, None for none. The first column names a row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


def _as_tables(profile: DeviceProfile) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False, color_system=None)
    lines = box.SIMPLE_HEAD if console.encoding.startswith("utf") else box.ASCII
    with console.capture() as capture:
        console.print(*_facts(profile), sep="\n")
        for figures in _tables(profile):
            table = Table(box=lines, show_edge=False)
            for number, column in enumerate(figures.columns):
                table.add_column(column, justify="right" if number else "left", overflow="fold")
            for row in figures.rows:
                table.add_row(
                    *(cell if cell is None or isinstance(cell, str) else f"{cell / MIB:,.0f}" for cell in row)
                )
            console.print("", figures.title, table, sep="\n")
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _as_lines(profile: DeviceProfile) -> str:
    lines = _facts(profile)
    for table in _tables(profile):
        for name, *cells in table.rows:
            texts = [cell if cell is None or isinstance(cell, str) else f"{format_size(cell)}/s" for cell in cells]
            figures = [f"{column} {text}" for column, text in zip(table.columns[1:], texts, strict=True) if text]
            lines.append(f"{table.columns[0]} {name}: {', '.join(figures)}")
    return "\n".join(lines) + "\n"


def _facts(profile: DeviceProfile) -> list[str]:
    limit = f", of which {format_size(profile.memory_limit_bytes)} may be used" if profile.memory_limit_bytes else ""
    one, many = (f"{speed / 1e9:.1f}" for speed in profile.attention_flops_per_s)
    return [
        f"processor: {profile.cpu}, {profile.physical_cores} cores, {profile.logical_cores} threads",
        f"memory: {format_size(profile.memory_bytes)}{limit}",
        f"attention: {one} GFLOP/s for one token, {many} for many",
        f"overhead: {profile.node_s * 1e6:.2f} us a node, {profile.stop_s * 1e6:.1f} us a stop",
        f"measured: {profile.measured_at}, {profile.library}",
    ]


def _tables(profile: DeviceProfile) -> Iterator[_Table]:
    if profile.disks:
        blocks = sorted({read.block_bytes for disk in profile.disks for read in disk.reads})
        columns = ("disk", "device", "type", *(format_size(block) for block in blocks), "first use", "limit")
        rows = tuple(_disk_row(disk, blocks) for disk in profile.disks)
        has_limits = any(disk.limit for disk in profile.disks)
        yield _Table(
            "Reading in blocks of each size, MiB/s",
            columns if has_limits else columns[:-1],
            rows if has_limits else tuple(row[:-1] for row in rows),
        )
    on_gpus = ((f" on {gpu.backend}", gpu.kernels) for gpu in profile.gpus)
    for place, kernels in ("", profile.kernels), (" repacked", profile.repacked_kernels), *on_gpus:
        if kernels:
            widths = sorted({kernel.tokens for kernel in kernels})
            columns = (f"weights{place}", *(format_count(tokens, "token") for tokens in widths))
            rows = tuple(_kernel_rows(kernels, widths))
            yield _Table(f"Computing{place}: weights gone through, MiB/s", columns, rows)
    if profile.gpus:
        columns = ("GPU", "name", "kind", "memory", "free", "upload, MiB/s")
        yield _Table("GPUs", columns, tuple(map(_gpu_row, profile.gpus)))


def _disk_row(disk: DiskProfile, blocks: Sequence[int]) -> tuple[str | float | None, ...]:
    speeds = {read.block_bytes: read.bytes_per_s for read in disk.reads}
    kind = disk.file_system if disk.is_direct else f"{disk.file_system}, not direct"
    return disk.folder, disk.device, kind, *map(speeds.get, blocks), disk.first_use_bytes_per_s, disk.limit


def _gpu_row(gpu: GpuProfile) -> tuple[str | float | None, ...]:
    sizes = format_size(gpu.total_bytes), format_size(gpu.free_bytes)
    return gpu.name, gpu.backend, gpu.kind, *sizes, gpu.upload_bytes_per_s


def _kernel_rows(kernels: Sequence[KernelSpeed], widths: Sequence[int]) -> Iterator[tuple[str | float | None, ...]]:
    speeds = {(k.type_name, k.row_elements, k.by_expert, k.tokens): k.bytes_per_s for k in kernels}
    for type_name, row_elements, by_expert in dict.fromkeys(key[:3] for key in speeds):
        found = (speeds.get((type_name, row_elements, by_expert, tokens)) for tokens in widths)
        yield f"{type_name}{' experts' * by_expert}, rows of {row_elements:,}", *found
