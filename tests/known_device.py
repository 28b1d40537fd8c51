"""A device whose speeds are known, so that nothing is measured: to measure what a model needs takes half a minute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench_samples import PROFILE
from edge_run.base.profile import KernelSpeed, RepackedSpeed
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.mount import Mount, find_mount
from edge_run.devices.host.profile import (
    CostsFigure,
    DiskFigure,
    KernelFigure,
    Measurements,
    PassOverheads,
    ProfileStore,
    RepackedFigure,
)
from edge_run.runtime.probing.kernels import has_repacked_kernel
from edge_run.runtime.probing.probe import _kernels
from edge_run.runtime.probing.workload import measured_now, this_setup
from edge_run.tiers.gguf import read_gguf


def know_device(cache: Path, model: Path, *folders: Path) -> None:
    """Keep in the cache folder what a probe of `model` would find, and of the disks of `folders`; made up."""
    now, threads = measured_now(), compute_threads(None)
    kernels, repacked = list[KernelFigure](), list[RepackedFigure]()
    for type_name, row_elements, tokens, by_expert in _kernels(read_gguf(model)):
        kind = type_name, row_elements, tokens, threads, by_expert
        is_there = has_repacked_kernel(type_name, row_elements, by_expert)
        kernels.append(KernelFigure(now, False, KernelSpeed(*kind, 1e9)))
        repacked.append(RepackedFigure(now, False, RepackedSpeed(*kind, 2e9, 1e9), is_there))
    costs = PassOverheads(threads, PROFILE.node_s, PROFILE.stop_s, PROFILE.attention_flops_per_s)
    measured = Measurements(
        kernels=tuple(kernels),
        repacked=tuple(repacked),
        costs=(CostsFigure(now, False, costs),),
        disks=tuple(_disk(now, mount) for mount in {find_mount(path) for path in (model, *folders)}),
    )
    assert ProfileStore(cache).save(this_setup(), measured)


def _disk(now: str, mount: Mount) -> DiskFigure:
    disk = replace(PROFILE.disks[0], device=mount.device, file_system=mount.file_system, limit=mount.limit)
    return DiskFigure(now, False, mount.volume, disk)
