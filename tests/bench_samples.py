"""A device, a plan and measurements that nobody measured, for the tests of `edge-run bench`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge_run.base.bench import MMAP, OURS, Bench, Measurement, MemoryBox
from edge_run.base.profile import DeviceProfile, DiskProfile, KernelSpeed, ReadSpeed
from edge_run.base.results import Forecast, Numerics, Plan, PlanItem
from edge_run.base.units import MIB
from edge_run.runtime.bench.comparison import compare, same_tokens

NUMERICS = Numerics("llama-cpp-python 0", False, 1, "auto", "f16", "f16", 16, 1)
PROFILE = DeviceProfile(
    measured_at="2026-01-02T03:04:05+00:00",
    library="llama-cpp-python 0",
    cpu="a processor",
    physical_cores=4,
    logical_cores=8,
    memory_bytes=8192 * MIB,
    memory_limit_bytes=0,
    node_s=1e-6,
    stop_s=1e-5,
    attention_flops_per_s=(1e9, 1e10),
    kernels=tuple(KernelSpeed("Q4_0", 512, tokens, 1, False, 1e9 / tokens) for tokens in (1, 64)),
    disks=(DiskProfile("/", "/dev/x", "ext4", True, "", 1e9, (1e-11, 1e-10), (ReadSpeed(8 * MIB, 4, 1e9),)),),
    gpus=(),
)
FORECAST = Forecast(64, 0.25, 3.75, 16.0, 2.0, 0.25, 0.5, "disk")
PLAN = Plan(
    mode="streamed", budget_bytes=200 * MIB, minimum_bytes=100 * MIB, model_bytes=400 * MIB, pinned_bytes=50 * MIB,
    window_bytes=50 * MIB, streamed_bytes_per_pass=350 * MIB, kv_bytes=10 * MIB, context_tokens=512, readers=4,
    items=(PlanItem("program", 60 * MIB, ""), PlanItem("pinned", 130 * MIB, "")), forecast=FORECAST,
)  # fmt: skip


def measurement(backend: str = OURS, **changed: Any) -> Measurement:
    """Return a measurement; mmap takes twice as long."""
    slow = 2 if backend == MMAP else 1
    whole = Measurement(
        backend=backend,
        mode="streamed" if backend == OURS else "llama.cpp",
        load_s=0.5 * slow,
        first_token_s=4.5 * slow,
        start_s=5.0 * slow,
        prefill_tokens_per_s=14.0 / slow,
        decode_tokens_per_s=2.5 / slow,
        bytes_per_token=350.0 * MIB,
        bytes_read=3000 * MIB,
        peak_bytes=180 * MIB,
        swapped_bytes=0,
        limit_bytes=200 * MIB,
        token_ids=(1, 2, 3),
        numerics=NUMERICS,
    )
    return replace(whole, **changed)


def bench(*measurements: Measurement, **changed: Any) -> Bench:
    """Return a comparison of `measurements`."""
    whole = Bench(
        model="model.gguf",
        started_at="2026-01-03T00:00:00+00:00",
        cpu=PROFILE.cpu,
        cores=4,
        library=PROFILE.library,
        numerics=NUMERICS,
        prompt_tokens=64,
        predict_tokens=3,
        rounds=sum(one.backend == OURS for one in measurements),
        plan=PLAN,
        profiled_at=PROFILE.measured_at,
        profile_problem="",
        box=MemoryBox(200 * MIB, "", 131072),
        measurements=measurements,
        comparisons=compare(PLAN, measurements),
        has_same_tokens=same_tokens(measurements),
        mmap_problem="",
    )
    return replace(whole, **changed)
