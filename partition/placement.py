"""Which layers lie on the GPU, and which of these leave their widest weights in DRAM. Pure.

A byte of weights on the GPU need not be read elsewhere, so it is worth as much as tokens need it often. Keys and
values, attention, shared and dense weights come first; the experts of a mixture of experts, of which a token uses a
few, come last. llama.cpp takes the output first, then layers from the end of the model. Each placement holds all that
the placement before it holds, so that they are in the order of their size and of their worth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from edge_run.base.errors import BudgetError, option
from edge_run.base.units import MIB, format_size, round_up

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"ffn_.*_exps\.")
_BIASED_EXPERTS = re.compile(r"blk\.\d+\.ffn_.*_exps\.bias")
_FEED = re.compile(r"ffn_(up|gate|down|gate_up)\.weight")


@dataclass(frozen=True, slots=True)
class Placement:
    """The last layers of a model, on a GPU.

    n_layers: how many, as llama.cpp counts, for which the output is a layer too.
    n_narrow: how many of these, the first ones, leave their widest weights in DRAM: the experts of a mixture of
        experts, the feed-forward network of other models.
    host_patterns: patterns for the names of the tensors that stay in DRAM.
    """

    n_layers: int
    n_narrow: int
    host_patterns: tuple[str, ...] = ()


NOTHING = Placement(0, 0)
LEAST_GAIN = 1.03  # of times that were forecast: what is nearly as fast is no reason to leave a GPU empty


def has_biased_experts(names: Iterable[str]) -> bool:
    """Return whether the experts of a model with tensors of these names have biases."""
    return any(_BIASED_EXPERTS.fullmatch(name) for name in names)


def placements(names: Iterable[str], n_layers: int, *, may_hold_experts: bool = True) -> list[Placement]:
    """Return all placements of a model of `n_layers` layers and tensors of these names, from nothing to everything.

    may_hold_experts: whether the largest placement holds the experts of a mixture of experts.
    """
    by_layer = [match.groups() for name in names if (match := _LAYER.fullmatch(name))]
    experts = sorted({rest for _, rest in by_layer if _EXPERTS.match(rest)})
    wide = experts or sorted({rest for _, rest in by_layer if _FEED.fullmatch(rest)})
    have_wide = {int(layer) for layer, rest in by_layer if rest in wide}

    def placement(n: int, n_narrow: int) -> Placement:
        first = n_layers + 1 - n
        narrow = sorted(have_wide.intersection(range(first, first + n_narrow)))
        return Placement(n, n_narrow, _patterns(narrow, wide))

    if experts:
        steps = [(n, max(0, n - 1)) for n in range(n_layers + 2)]
        steps += [(n_layers + 1, n_narrow) for n_narrow in range(n_layers - 1, -1, -1)] * may_hold_experts
    else:
        steps = [(0, 0), (1, 0)]
        steps += [(n, n_narrow) for n in range(2, n_layers + 2) for n_narrow in (1, 0)]
    found = [placement(*step) for step in steps]
    # A layer without wide weights is as narrow as it is whole.
    return [now for now, after in zip(found, [*found[1:], None], strict=True) if not _is_same(now, after)]


def _is_same(one: Placement, other: Placement | None) -> bool:
    return other is not None and (one.n_layers, one.host_patterns) == (other.n_layers, other.host_patterns)


def _patterns(layers: Collection[int], wide: Sequence[str]) -> tuple[str, ...]:
    if not layers or not wide:
        return ()
    which = "|".join(map(str, layers))
    what = "|".join(name.replace(".", r"\.") for name in wide)
    return (rf"^blk\.({which})\.({what})$",)


def best_placement(
    choices: Sequence[Placement], budget_bytes: int, needed: Callable[[Placement], int], is_asked: bool
) -> Placement:
    """Return the last of `choices` that fits the budget; the first choice is to hold nothing.

    needed: the bytes of a choice on the GPU, which grow from choice to choice, or nearly so.
    is_asked: whether the user named the budget; then BudgetError, with the smallest budget that works, is raised where
        no layer fits.
    """
    low, high = 0, len(choices) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(choices[middle]) <= budget_bytes else (low, middle - 1)
    if low == 0 and is_asked and len(choices) > 1:
        minimum = round_up(needed(choices[1]), MIB)
        raise BudgetError(
            f"GPU memory {format_size(budget_bytes)}: too small for any part of this model, it needs at least "
            f"{minimum // MIB} MiB; raise {option('gpu_memory')}, or give 0 to leave the GPU out",
            found_bytes=budget_bytes,
            minimum_bytes=minimum,
        )
    return choices[low]


def worth_timing(choices: Sequence[Placement], largest: Placement, *, is_asked: bool) -> list[Placement]:
    """Return those of `choices` up to the `largest` that fits that may be the fastest.

    choices: in the order of `placements`.

    These are the largest, the largest without wide weights, and, unless the user asked for a GPU, nothing. Each further
    layer adds the same time or saves the same time, so no choice in between is better than the best of these.
    """
    fitting = choices[1 : choices.index(largest) + 1]
    narrow = [one for one in fitting if one.n_narrow == max(0, one.n_layers - 1)]
    return list(dict.fromkeys([*fitting[-1:], *narrow[-1:], *([] if is_asked else [NOTHING])]))


def fastest(options: Sequence[Placement], token_s: Callable[[Placement], float | None]) -> Placement:
    """Return the option with the fastest tokens; the first, unless another is known to be clearly faster."""
    times = [(option, token_s(option)) for option in options] if len(options) > 1 else []
    known = [(option, seconds) for option, seconds in times if seconds is not None]
    if not known or len(known) < len(times):
        return options[0]
    best, least_s = min(known, key=lambda one: one[1])
    return best if least_s * LEAST_GAIN < known[0][1] else options[0]
