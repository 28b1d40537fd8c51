"""Holds what was measured against what was predicted, and against llama.cpp's mmap: each figure, and the tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from edge_run.base.bench import MMAP, OURS, Comparison, Measurement, RunSpread
from edge_run.base.results import Plan

COMPARED = (
    "load_s",
    "first_token_s",
    "start_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "bytes_per_token",
    "peak_bytes",
)


def _predictions(plan: Plan) -> dict[str, float]:
    """Return what `plan` says of the figures in COMPARED."""
    found: dict[str, float] = {
        "bytes_per_token": plan.forecast.read_bytes_per_token if plan.forecast else plan.streamed_bytes_per_pass,
        "peak_bytes": sum(item.size_bytes for item in plan.items),
    }
    if (forecast := plan.forecast) is not None:
        found |= {
            "load_s": forecast.load_s,
            "first_token_s": forecast.first_token_s,
            "start_s": forecast.load_s + forecast.first_token_s,
            "prefill_tokens_per_s": forecast.prefill_tokens_per_s,
            "decode_tokens_per_s": forecast.decode_tokens_per_s,
        }
    return found


def compare(plan: Plan, measurements: Iterable[Measurement]) -> tuple[Comparison, ...]:
    """Return each figure as predicted by `plan`, as measured, and as mmap has it."""
    measurements, predicted = tuple(measurements), _predictions(plan)
    return tuple(
        _comparison(name, predicted.get(name), _spread(measurements, OURS, name), _spread(measurements, MMAP, name))
        for name in COMPARED
    )


def same_tokens(measurements: Iterable[Measurement]) -> bool | None:
    """Return whether all of `measurements` gave the same tokens under one numerics key.

    None for fewer than two, and where only some ran with repacked weights, or as llama.cpp's own loader repacks,
    each kind of run with tokens of its own.
    """
    outcomes: dict[tuple[str, bool], list[object]] = {}
    for measurement in measurements:
        numerics = measurement.numerics
        kind = numerics.repacked, numerics.use_extra_bufts
        outcomes.setdefault(kind, []).append((measurement.token_ids, numerics))
    if any(len(set(found)) > 1 for found in outcomes.values()):
        return False
    return True if len(outcomes) == 1 and sum(map(len, outcomes.values())) > 1 else None


def _comparison(name: str, predicted: float | None, measured: RunSpread | None, mmap: RunSpread | None) -> Comparison:
    deviation = ratio = None
    if predicted is not None and measured is not None and measured.median:
        deviation = predicted / measured.median - 1
    if measured is not None and mmap is not None and mmap.median:
        ratio = measured.median / mmap.median
    return Comparison(name, predicted, measured, mmap, deviation, ratio)


def _spread(measurements: Iterable[Measurement], backend: str, name: str) -> RunSpread | None:
    values = [getattr(measurement, name) for measurement in measurements if measurement.backend == backend]
    known = [float(value) for value in values if value is not None]
    return RunSpread(statistics.median(known), min(known), max(known)) if known else None
