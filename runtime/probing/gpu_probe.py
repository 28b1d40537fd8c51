"""How fast a GPU computes: llama.cpp's kernels on it, and what a pass costs there besides weights.

Each figure is kept as soon as it is measured. A GPU that the processor plays is given a fraction of the work.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from edge_run.base.errors import NotSupported
from edge_run.base.profile import GpuProfile, KernelSpeed
from edge_run.devices.host.machine import OtherLoad
from edge_run.devices.host.profile import GpuCosts, GpuCostsFigure, GpuKernelFigure, Measurements
from edge_run.runtime.gpu.devices import Gpu, measure_upload
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.probing import kernels
from edge_run.runtime.probing.workbench import GpuBench
from edge_run.runtime.probing.workload import ATTENTION, MANY_TOKENS, OTHERS_SHARE, Multiplication, measured_now

logger = logging.getLogger(__name__)

SLOWNESS = 16  # of a GPU that the processor plays
MOST_SLOW_TOKENS = 64
BORDER_BYTES, BORDER_S = 16 << 10, 0.1


def gpu_profile(gpu: Gpu, known: Measurements, upload_bytes_per_s: float = 0.0) -> GpuProfile:
    """Return what is known of `gpu`. upload_bytes_per_s: where its costs are not known."""
    figures = [figure for figure in known.gpu_kernels if figure.gpu == gpu.description and figure.is_there]
    profile = GpuProfile(
        gpu.description,
        gpu.name,
        gpu.total_bytes,
        gpu.free_bytes,
        gpu.kind,
        upload_bytes_per_s,
        tuple(figure.speed for figure in figures),
    )
    costs = next((figure.costs for figure in known.gpu_costs if figure.gpu == gpu.description), None)
    return dataclasses.replace(profile, **dataclasses.asdict(costs)) if costs else profile


def missing_of(gpu: Gpu, wanted: Sequence[Multiplication], known: Measurements) -> list[Multiplication]:
    """Return which of `wanted` were not measured on `gpu`."""
    keys = {figure.key for figure in known.gpu_kernels}
    return [one for one in _fitting(gpu, wanted) if (gpu.description, *one) not in keys]


def is_known(gpu: Gpu, wanted: Sequence[Multiplication], known: Measurements) -> bool:
    """Return whether all that a forecast needs of `gpu` was measured."""
    has_costs = any(figure.gpu == gpu.description for figure in known.gpu_costs)
    return has_costs and not missing_of(gpu, wanted, known)


def measure_gpu(
    gpu: Gpu,
    wanted: Sequence[Multiplication],
    known: Measurements,
    keep: Callable[[Measurements], None],
    on_step: Callable[[str], None],
) -> None:
    """Measure what is not known of `gpu`, and `keep` each figure. Raises KernelError where it has no room."""
    bench = GpuBench(gpu.handle, gpu.has_own_memory, SLOWNESS if gpu.is_software else 1)
    missing = missing_of(gpu, wanted, known)
    for number, (type_name, row_elements, tokens, by_expert) in enumerate(missing, 1):
        on_step(f"{gpu.name}: multiplying {type_name}, {tokens} wide ({number} of {len(missing)})")
        load, lacks_room, is_there = OtherLoad(), _lacks_room(gpu, tokens), True
        try:
            speed = kernels.measure_matmul(type_name, row_elements, tokens, 1, by_expert, bench)
        except NotSupported as error:
            logger.info("%s, rows of %d: %s", type_name, row_elements, error)
            speed, is_there = KernelSpeed(type_name, row_elements, tokens, 0, by_expert, 1.0), False
        speed = dataclasses.replace(speed, threads=0)
        figure = GpuKernelFigure(measured_now(), lacks_room or _is_busy(load, gpu), gpu.description, speed, is_there)
        keep(Measurements(gpu_kernels=(figure,)))
    if not is_known(gpu, (), known):
        on_step(f"{gpu.name}: attention, nodes, and the way there")
        load, lacks_room = OtherLoad(), _lacks_room(gpu, 1)
        widths = 1, MOST_SLOW_TOKENS if gpu.is_software else MANY_TOKENS
        one, many = (_attention(tokens, bench) for tokens in widths)
        node_s = kernels.measure_node_s(1, bench)
        costs = GpuCosts(measure_upload(gpu), node_s, measure_border_s(gpu), (one, many))
        is_disturbed = lacks_room or _is_busy(load, gpu)
        keep(Measurements(gpu_costs=(GpuCostsFigure(measured_now(), is_disturbed, gpu.description, costs),)))


def measure_border_s(gpu: Gpu) -> float:
    """Return the seconds that it costs to hand a token's values from the processor to `gpu`, or back."""
    content = np.zeros(BORDER_BYTES, np.uint8)
    with ggml.tensor_on(gpu.handle, BORDER_BYTES) as tensor:
        n_ways, started = 0, time.perf_counter()
        while time.perf_counter() - started < BORDER_S:
            ggml.set_tensor(tensor, content.ctypes.data, 0, BORDER_BYTES)
            ggml.get_tensor(tensor, content.ctypes.data, 0, BORDER_BYTES)
            n_ways += 2
        return (time.perf_counter() - started) / n_ways


def _fitting(gpu: Gpu, wanted: Sequence[Multiplication]) -> list[Multiplication]:
    most = MOST_SLOW_TOKENS if gpu.is_software else MANY_TOKENS
    return [one for one in wanted if one[2] <= most]


def _attention(tokens: int, bench: GpuBench) -> float:
    """Return the speed of attention: the processor's where the GPU has no kernel for it, as it is computed there."""
    try:
        return kernels.measure_attention(tokens, ATTENTION, threads=1, gpu=bench)
    except NotSupported:
        return kernels.measure_attention(tokens, ATTENTION, threads=1)


def _lacks_room(gpu: Gpu, tokens: int) -> bool:
    return not gpu.has_own_memory and kernels.lacks_room(tokens)


def _is_busy(load: OtherLoad, gpu: Gpu) -> bool:
    return gpu.is_software and load.share > OTHERS_SHARE
