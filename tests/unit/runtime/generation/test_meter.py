"""What the answers of a model have cost since it was opened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from edge_run.runtime.generation.meter import Interval, Meter
from edge_run.tiers.readers import ReadTotals

ENGINE = SimpleNamespace(
    wait_s=0.0, read_totals=ReadTotals(), load_s=0.0, memory_use=None, backend=None, expert_use=None, kv_spill=None
)


def test_an_answer_without_a_token_takes_none_from_the_others() -> None:
    """Of a token more was read than was, by one answer's share of one, for each prompt whose answer never began."""
    meter = Meter(cast("Any", ENGINE))
    meter.count(5, 10, Interval(reads=ReadTotals(bytes_read=900)))
    assert meter.stats().io.bytes_per_token == 100
    for _ in range(4):
        meter.count(5, 0, Interval())
    assert meter.stats().io.bytes_per_token == 100
    assert meter.stats().completion_tokens == 10
