"""Route traces for tests: routers that have favourites, repeat themselves, and change their minds."""

from __future__ import annotations

import random
from pathlib import Path

from edge_run.prefetch.experts import MoeShape
from edge_run.prefetch.routes import DECODE, PREFILL, LookUp, Route, RouteHeader, RouteWriter

SMALL = MoeShape(layers=(0, 1, 2, 3), experts=16, used=3)
EXPERT_BYTES = 1000


def look_ups(
    moe: MoeShape, tokens: int, seed: int = 0, skew: float = 1.0, drift_tokens: int = 40, prompt_tokens: int = 8
) -> list[LookUp]:
    """Return a prompt's batches and `tokens` tokens, routed by Zipf's law; favourites change every `drift_tokens`."""
    chance = random.Random(seed)
    weights = [1 / (rank + 1) ** skew for rank in range(moe.experts)]
    favourites = {layer: chance.sample(range(moe.experts), moe.experts) for layer in moe.layers}

    def chosen(layer: int) -> tuple[int, ...]:
        found: dict[int, None] = {}
        while len(found) < moe.used:
            found[favourites[layer][chance.choices(range(moe.experts), weights)[0]]] = None
        return tuple(found)

    made = []
    if prompt_tokens:
        for layer in moe.layers:
            made.append(LookUp(layer, tuple(e for _ in range(prompt_tokens) for e in chosen(layer)), True))
    for token in range(tokens):
        if token and token % drift_tokens == 0:
            for order in favourites.values():
                one, other = chance.sample(range(moe.experts), 2)
                order[one], order[other] = order[other], order[one]
        made += [LookUp(layer, chosen(layer), False) for layer in moe.layers]
    return made


def write_trace(path: Path, moe: MoeShape = SMALL, tokens: int = 20) -> Path:
    """Write a trace of random routing, with a prompt."""
    header = RouteHeader(dict.fromkeys(moe.layers, EXPERT_BYTES), {}, "tiny.gguf", "tiny", moe.experts, moe.used)
    step = 8
    with path.open("w", encoding="utf-8") as file:
        writer = RouteWriter(file, header)
        for layer, experts, is_prefill in look_ups(moe, tokens, 0):
            phase = PREFILL if is_prefill else DECODE
            writer.write(
                [
                    Route(0, phase, i // moe.used if is_prefill else step, layer, i % moe.used, expert)
                    for i, expert in enumerate(experts)
                ]
            )
            step += not is_prefill and layer == moe.layers[-1]
    return path
