"""How many of the experts that a layer will choose are named beforehand: the recall of every predictor.

Model: kit-moe as it was trained, resident. Text: held-out English, in passages of 256 tokens, token after token. Each
predictor names as many experts as a token uses (4 of 32), one and two layers ahead, when the present layer has chosen
(`chosen`, as streaming uses it), and when the present layer is done (`output`). All learn as they go, from nothing; the
first tokens count too. Further rows: the same after so many tokens more.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from _box import KIT_MOE, NOVELS, need, write_results
from _predictors import PREDICTORS, Predictor, make_predictor

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.prefetch.experts import MoeShape
from edge_run.prefetch.predictors import Router
from edge_run.runtime.decoding.driver import Steps
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.graph.nodes import GraphMap, Node
from edge_run.runtime.graph.observer import chosen_experts
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.streaming.taps import RoutedLayer, Tap, routed_layers
from edge_run.tiers.gguf import GgufModel, read_gguf

PASSAGE = 256
PLACES = ("chosen", "output")


class Observed:
    """A feature of passes: gives every predictor what it may see, and counts what it said of what was chosen then."""

    def __init__(self, gguf: GgufModel) -> None:
        self.right: defaultdict[tuple[str, str, int, int], list[int]] = defaultdict(list)  # by predictor, place, ahead
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._gguf = gguf
        self._layers: list[RoutedLayer | None] = []
        self._routers: dict[int, Router | None] = {}
        self._predictors: dict[tuple[str, str], Predictor] = {}
        self._said: dict[tuple[str, str, int, int], frozenset[int]] = {}
        self.is_resident = lambda address, expert: True

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Stop at the places where states can be read."""
        self._layers = routed_layers(graph, self._gguf)
        count, n_used = self._gguf.value("expert_count"), self._gguf.used_experts
        assert isinstance(count, int)
        moe = MoeShape(tuple(range(len(self._layers))), count, n_used)
        self._predictors = self._predictors or {
            (name, place): make_predictor(name, moe, self._router, 2) for name in PREDICTORS for place in PLACES
        }
        for number, layer in enumerate(self._layers):
            assert layer is not None
            for place, tap in zip(PLACES, (layer.chosen, layer.output), strict=True):
                if tap is not None:
                    step = self._chosen if place == "chosen" else self._output
                    steps.stop_before(tap.ordinal, lambda address, n=number, t=tap, s=step: s(n, t, address))

    def before_unknown(self, node: Node, address: int) -> bool:
        """Nothing is seen in a graph that is not known."""
        return False

    def after_unknown(self) -> None:
        """Nothing to do."""

    def abandon(self) -> None:
        """Nothing to do."""

    def _router(self, number: int) -> Router | None:
        if number not in self._routers:
            layer = self._layers[number] if number < len(self._layers) else None
            self._routers[number] = layer.open_router() if layer else None
        return self._routers[number]

    def _chosen(self, number: int, tap: Tap, address: int) -> None:
        experts = chosen_experts(address, self._router(number).weights.shape[0])[-1].tolist()  # type: ignore[union-attr]
        for (name, place, ahead, layer), said in list(self._said.items()):
            if layer == number:
                self.right[name, place, ahead, layer].append(len(said & set(experts)))
                del self._said[name, place, ahead, layer]
        state = tap.read(address)
        for (name, place), predictor in self._predictors.items():
            started = time.perf_counter()
            predictor.see(number, experts, state)
            self.seconds[name, place] += time.perf_counter() - started
            if place == "chosen":
                self._ask(name, place, number, None)

    def _output(self, number: int, tap: Tap, address: int) -> None:
        state = tap.read(address)
        for name, place in self._predictors:
            if place == "output":
                self._ask(name, place, number, state)

    def _ask(self, name: str, place: str, number: int, state: np.ndarray | None) -> None:
        started = time.perf_counter()
        for ahead in (1, 2):
            scores = self._predictors[name, place].scores(ahead, state) if number + ahead < len(self._layers) else None
            if scores is not None:
                best = np.argpartition(scores, -self._gguf.used_experts)[-self._gguf.used_experts :]
                self._said[name, place, ahead, number + ahead] = frozenset(best.tolist())
        self.seconds[name, place] += time.perf_counter() - started


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=KIT_MOE)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--skip", type=int, default=200_000, help="characters of the text that are left out")
    arguments = parser.parse_args()
    need(arguments.model, NOVELS)
    gguf = read_gguf(arguments.model)
    observed = Observed(gguf)
    config = ModelConfig(context_tokens=PASSAGE, micro_batch_tokens=64, threads=1)
    engine = Engine.open(arguments.model, config, recorder=observed)  # type: ignore[arg-type]
    text = NOVELS.read_text()[arguments.skip : arguments.skip + arguments.tokens * 8]
    tokens = ggml.tokenize(engine.model.vocab, text, False, False)[: arguments.tokens]
    for start in range(0, len(tokens), PASSAGE):
        engine.decoder.rewind(0, 0)
        for position, token in enumerate(tokens[start : start + PASSAGE]):
            engine.decoder.decode([BatchToken(token, position, 0, True)])
    engine.close()
    n_used, half, rows = gguf.used_experts, len(tokens) // 2, []
    for ahead in (1, 2):
        for place in PLACES:
            for name in PREDICTORS:
                found = {key[3]: counts for key, counts in observed.right.items() if key[:3] == (name, place, ahead)}
                layers = {layer: float(np.mean(counts)) / n_used for layer, counts in sorted(found.items())}
                later = float(np.mean([np.mean(counts[half:]) for counts in found.values()])) / n_used
                rows.append(
                    {
                        "layers_ahead": ahead,
                        "asked_at": place,
                        "predictor": name,
                        "recall": float(np.mean(list(layers.values()))),
                        "recall_second_half": later,
                        "recall_by_layer": " ".join(f"{layer}:{value:.3f}" for layer, value in layers.items()),
                        "us_per_layer": observed.seconds[name, place] / len(tokens) / len(layers) * 1e6,
                    }
                )
                print(rows[-1], flush=True)
    lines = [
        f"* {ahead} ahead, asked at {place}: "
        + ", ".join(
            f"{row['predictor']} {row['recall']:.3f}"
            for row in rows
            if (row["layers_ahead"], row["asked_at"]) == (ahead, place)
        )
        + "."
        for ahead in (1, 2)
        for place in PLACES
    ]
    write_results("prediction", rows, "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()
