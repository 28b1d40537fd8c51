"""Opens, runs and times onnxruntime sessions, and turns errors of onnxruntime into those of edge-run.

A network is a stranger's program: one of a few hundred bytes can make tensors that take all memory, or compute without
end. So the pass that finds the shapes of its tensors (`traced`) is run in a `Cell`, of which this module is the job.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from edge_run.base.config import check_threads
from edge_run.base.errors import KernelError, ModelFileError, NotSupported
from edge_run.base.extras import SPLIT, need
from edge_run.base.files.drafts import draft_of, remove_abandoned_drafts
from edge_run.base.files.whole import writing
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.memory import available_bytes
from edge_run.runtime.processes.cell import Cell, Overrun
from edge_run.runtime.processes.cell_child import allow_memory

MOST_VALUES = 1 << 24  # of an image that a network takes, or of the latents that its head makes
MOST_NETWORK_BYTES = 2**31 - 1  # what protobuf can hold in one piece
TIMED_RUNS = 7
TIMED_S = 0.5
LONGEST_S = 600.0  # of a pass that finds the shapes of tensors
_NO_MEMORY = ("bad_alloc", "bad allocation", "bfc_arena", "allocate memory")  # as onnxruntime says it
_JOB = "edge_run.runtime.split.onnx_session"


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


def traced(
    proto: bytes, shape: Sequence[int], dtype: np.dtype[Any], name: str
) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return the shape and type of each output of a network that has one input, by name.

    proto: the network. shape, dtype: of its input. name: what messages call it. Raises ModelFileError, KernelError,
    TierReadError where the network cannot be written to a file for that, and NotSupported where it takes more memory
    than there is, or too long.
    """
    place = Path(tempfile.gettempdir(), "edge-run")
    remove_abandoned_drafts(place)
    with draft_of(place) as folder, contextlib.closing(Cell(_JOB)) as cell:  # which goes also when a signal ends us
        file = folder / "network.onnx"
        with writing(str(file), "make room, or name another folder in the variable TMPDIR"):
            folder.mkdir(mode=0o700)
            file.write_bytes(proto)
        del proto
        asked: dict[str, Any] = {"path": str(file), "shape": list(shape), "dtype": dtype.str, "name": name}
        try:
            found = cell.ask("trace", LONGEST_S, most_bytes=available_bytes(), **asked)
        except Overrun as overrun:
            raise NotSupported(f"{name}: a pass over it {overrun}") from None
    return {one: (tuple(size), np.dtype(kind)) for one, (size, kind) in json.loads(found).items()}


def trace(path: str, shape: list[int], dtype: str, name: str, most_bytes: int) -> bytes:
    """Return what `traced` does, as JSON: in the cell, within `most_bytes` of memory."""
    allow_memory(most_bytes)
    session = open_session(path, name, is_optimised=False)
    names = [one.name for one in session.get_outputs()]
    try:
        values = run_session(session, arbitrary(tuple(shape), np.dtype(dtype), 0))
    except KernelError as error:
        if any(word in str(error) for word in _NO_MEMORY):
            raise MemoryError from error
        raise
    found = dict(zip(names, values, strict=True))
    tensors = {one: value for one, value in found.items() if isinstance(value, np.ndarray)}
    return json.dumps({one: (value.shape, value.dtype.str) for one, value in tensors.items()}).encode()


def arbitrary(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> NDArray[Any]:
    """Return arbitrary numbers, the same for the same seed."""
    generator = default_rng(seed)
    if np.issubdtype(dtype, np.floating):
        return generator.random(shape, dtype=np.float32).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)


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
    """Return the largest absolute difference between two lists of outputs.

    Infinite where a shape differs, and where one number is none or infinite and the other is something else.
    """
    worst = 0.0
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            return float("inf")
        left, right = one.astype(np.float64), other.astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.nan_to_num(np.abs(left - right), nan=np.inf, posinf=np.inf)
        is_same = (left == right) | (np.isnan(left) & np.isnan(right))
        worst = max(worst, float(np.where(is_same, 0.0, apart).max(initial=0.0)))
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
