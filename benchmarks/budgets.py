"""More memory never reads more: bytes per token as planned under budgets from the smallest that works to the model.

Budgets are 20 in geometric steps, and, where the mode of a plan or the width of its passes changes between two of
them, the change is looked for and planned 5 % below and above. Plans take no weight into memory, so the models may be
sparse files of real proportions. Dense models: what a step adds to the budget should come off what a token reads, 0.95
of it. Mixtures: while a token reads a quarter of the weights that it uses or more, no step should divide it by more
than 1.5 times what the budget was multiplied by.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from _box import write_results

import edge_run
from edge_run.base.units import GIB, MIB

STEPS = 20
BESIDE = 0.05
PRECISION_BYTES = 2 * MIB


def main() -> None:
    """Plan for each model that is named, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--name", default="budgets")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        rows += sweep(model, arguments.context)
    write_results(arguments.name, rows, f"{__doc__.strip()}\n\n{table(rows)}")


def sweep(model: Path, context: int) -> list[dict[str, Any]]:
    """Return a row for each budget, smallest first, each compared with the one before."""

    def planned(budget_bytes: int) -> edge_run.Plan:
        return edge_run.plan(model, memory=budget_bytes, context_tokens=context)

    whole = planned(2 * model.stat().st_size + 4 * GIB)
    most = sum(item.size_bytes for item in whole.items)
    least = smallest(planned, MIB)
    budgets = [round(least * (most / least) ** (step / (STEPS - 1))) for step in range(STEPS)]
    plans = {budget: planned(budget) for budget in budgets}
    for low, high in pairwise(budgets):
        if kind(plans[low]) != kind(plans[high]):
            change = bisect(planned, low, high)
            beside = (change * (1 - BESIDE), change * (1 + BESIDE))
            plans |= {round(budget): planned(round(budget)) for budget in beside if least <= budget <= most}
    return [row(model, plans[budget]) for budget in sorted(plans)]


def smallest(planned: Callable[[int], edge_run.Plan], budget_bytes: int) -> int:
    """Return the smallest budget that has a plan, from one that is refused or near it."""
    while True:
        try:
            planned(budget_bytes)
        except edge_run.BudgetError as error:
            budget_bytes = max(error.minimum_bytes, budget_bytes + PRECISION_BYTES)
        else:
            return budget_bytes


def kind(plan: edge_run.Plan) -> tuple[str, bool, int]:
    """Return what changes with the budget besides amounts: the mode, whether by expert, and the width of passes."""
    return plan.mode, plan.expert_bytes > 0, plan.micro_batch_tokens


def bisect(planned: Callable[[int], edge_run.Plan], low: int, high: int) -> int:
    """Return the budget between two at which a plan becomes the kind that it is under the higher one."""
    wanted = kind(planned(high))
    while high - low > PRECISION_BYTES:
        middle = (low + high) // 2
        low, high = (low, middle) if kind(planned(middle)) == wanted else (middle, high)
    return high


def row(model: Path, plan: edge_run.Plan) -> dict[str, Any]:
    """Return the figures of one plan."""
    return {
        "model": model.stem,
        "budget_bytes": plan.budget_bytes,
        "mode": plan.mode,
        "by_expert": plan.expert_bytes > 0,
        "micro_batch_tokens": plan.micro_batch_tokens,
        "read_bytes": plan.streamed_bytes_per_pass,
        "read_bytes_of_batch": plan.streamed_bytes_per_batch,
        "pinned_bytes": plan.pinned_bytes,
        "expert_bytes": plan.expert_bytes,
        "lent_bytes": plan.lent_bytes,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader, and what each step gained."""
    lines = [
        "| model | budget | mode | passes | read per token | read less, of the bytes added | read before / now |",
        "|---|---|---|---|---|---|---|",
    ]
    before: dict[str, Any] | None = None
    for now in rows:
        gained, ratio = "", ""
        if before and before["model"] == now["model"]:
            added = now["budget_bytes"] - before["budget_bytes"]
            gained = f"{(before['read_bytes'] - now['read_bytes']) / added:.2f}"
            ratio = f"{before['read_bytes'] / now['read_bytes']:.2f}" if now["read_bytes"] else ""
        mode = "by expert" if now["by_expert"] else now["mode"]
        lines.append(
            f"| {now['model']} | {now['budget_bytes'] / MIB:,.0f} MiB | {mode} | {now['micro_batch_tokens']} | "
            f"{now['read_bytes'] / MIB:,.1f} MiB | {gained} | {ratio} |"
        )
        before = now
    return "\n".join(lines)


if __name__ == "__main__":
    main()
