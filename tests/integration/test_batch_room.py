"""Answers in shared passes, in a context that the budget has no room for when it is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_run import BudgetError, Generation, Model
from edge_run.base.units import MIB
from in_child import in_child
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"threads": 1, "context_tokens": 4096, "micro_batch_tokens": 64, "sequences": 4}


@in_child
def test_what_requests_share_takes_room_once(folder: Path) -> None:
    """Else each that ends leaves some room that nobody has again, until no pass can be computed any more."""
    with opened(make_model("llama", folder)) as model:
        room = model.plan.context_tokens
        assert 512 <= room < OPTIONS["context_tokens"]
        common = [3 + n % 200 for n in range(2 * room // 5)]
        many = model.generate_many([[*common, 210 + n] for n in range(24)], max_tokens=room // 12, temperature=0)
        found = many.results()
    assert [one.completion_tokens for one in found if isinstance(one, Generation)] == [room // 12] * 24


def opened(path: Path) -> Model:
    """Open a model in the smallest budget for it and a little more, in which it streams with a short context."""
    budget = 40 * MIB
    for _ in range(10):
        try:
            return Model(path, memory=budget, backend="edge-run", **OPTIONS)
        except BudgetError as error:
            budget = (error.minimum_bytes or 2 * budget) + path.stat().st_size // 10
    raise AssertionError("each budget was refused")
