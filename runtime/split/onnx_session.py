"""Opens, runs and times onnxruntime sessions, and turns errors of onnxruntime into those of edge-run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.config import check_threads
from edge_run.base.errors import KernelError, ModelFileError, NotSupported
from edge_run.base.extras import SPLIT, need
from edge_run.devices.host.machine import compute_threads

TIMED_RUNS = 7
TIMED_S = 0.5


def open_session(model: bytes | str, name: str, threads: int | None = None, is_optimised: bool = True) -> Any:
    """Return an `InferenceSession` on the CPU of a model, as bytes or as the path of a file.

    name: what messages call it. threads: None is one for each core that this process may use. Raises ModelFileError,
    or ConfigError for threads that cannot be.
    """
    check_threads(threads)
    ort = need("onnxruntime", SPLIT)
    options = ort.SessionOptions()
    options.intra_op_num_threads = compute_threads(threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what is wrong is raised
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other processes need the cores too
    if not is_optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common ancestor
        raise ModelFileError(f"{name}: onnxruntime cannot open it ({first_line(error)})") from error


def run_session(session: Any, value: NDArray[Any]) -> list[Any]:
    """Return all outputs of a session for its only input. Raises KernelError."""
    try:
        return list(session.run(None, {session.get_inputs()[0].name: value}))
    except Exception as error:
        raise KernelError(
            f"onnxruntime: a pass over a tensor of shape {value.shape} failed ({first_line(error)})"
        ) from error


def median_s(work: Callable[[], object]) -> float:
    """Return the median seconds of `work` after one pass that does not count; of few passes when time is up."""
    work()
    found: list[float] = []
    end_s = time.perf_counter() + TIMED_S
    while len(found) < TIMED_RUNS and (not found or time.perf_counter() < end_s):
        started_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - started_s)
    return statistics.median(found)


def largest_difference(first: list[Any], second: list[Any]) -> float:
    """Return the largest absolute difference between two lists of outputs; infinite where a shape differs."""
    worst = 0.0
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            return float("inf")
        if one.size:
            worst = max(worst, float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64)))))
    return worst


def check_finite(outputs: list[Any], what: str) -> None:
    """Raise NotSupported where a network, `what`, makes numbers that are infinite or none."""
    if not all(np.isfinite(one).all() for one in outputs):
        raise NotSupported(f"{what}: the network makes numbers that are not finite of it; check --mean and --std")


def is_identical(first: list[Any], second: list[Any]) -> bool:
    """Return whether no bit of the outputs differs."""
    return all(
        one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
        for one, other in zip(first, second, strict=True)
    )


def first_line(error: Exception) -> str:
    """Return what an error says, shortened: others write whole pages."""
    text = str(error).strip() or type(error).__name__
    return " ".join(text.splitlines()[0].split())[:240]
