"""Experts that are read ahead of the choice: routers found in real graphs, the same tokens whatever is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import small_engines
from edge_run.base.config import EXPERT_POLICIES, EXPERT_PREFETCH, ModelConfig
from edge_run.base.errors import PackedFileError
from edge_run.prefetch import controller
from edge_run.runtime.decoding.driver import Steps
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.graph.nodes import GraphMap, Node
from edge_run.runtime.graph.observer import chosen_experts
from edge_run.runtime.streaming.experts import ExpertStreaming
from edge_run.runtime.streaming.taps import RoutedLayer, routed_layers
from edge_run.runtime.tools.pack import pack
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.packed_file import HEAD
from exactness import fewest_frames, open_at
from in_child import in_child
from tiny_models import N_VOCAB, make_model

OPTIONS: dict[str, Any] = {
    "context_tokens": 256, "micro_batch_tokens": 16, "threads": 1, "check_file": False,
}  # fmt: skip
PROMPT = np.random.default_rng(0).integers(1, N_VOCAB, 24).tolist()


class Watcher:
    """A feature that lets each layer's router run on the state that was found for it, and compares."""

    def __init__(self, gguf: GgufModel) -> None:
        self.layers: list[RoutedLayer | None] = []
        self.agreed: list[bool] = []
        self.is_resident = lambda address, expert: True
        self._gguf = gguf

    def register(self, graph: GraphMap, steps: Steps) -> None:
        self.layers = routed_layers(graph, self._gguf)
        for layer in self.layers:
            if layer is not None and layer.chosen is not None:
                steps.stop_before(layer.chosen.ordinal, lambda address, layer=layer: self._compare(layer, address))

    def before_unknown(self, node: Node, address: int) -> bool:
        return False

    def after_unknown(self) -> None:
        """Nothing to do."""

    def abandon(self) -> None:
        """Nothing to do."""

    def _compare(self, layer: RoutedLayer, address: int) -> None:
        router = layer.open_router()
        assert router is not None
        assert layer.chosen is not None
        scores = router.preference(router.logits(layer.chosen.read(address)))
        chosen = chosen_experts(address, len(scores))[-1].tolist()
        named = np.argsort(-scores)[: len(chosen)].tolist()
        self.agreed.append(set(named) == set(chosen))


@in_child
def _routers_agree(name: str, folder: Path) -> None:
    path = make_model(name, folder)
    watcher = Watcher(read_gguf(path))
    engine = Engine.open(path, ModelConfig(**OPTIONS), recorder=watcher)  # type: ignore[arg-type]
    try:
        session = Session(engine.decoder)
        logits, _ = session.feed(PROMPT)
        for _ in range(6):
            logits = session.step(int(logits.argmax()))
    finally:
        engine.close()
    assert watcher.layers
    assert all(layer is not None for layer in watcher.layers)
    assert all(layer.output is not None for layer in watcher.layers if layer is not None)
    assert len(watcher.agreed) >= 6 * len(watcher.layers)
    assert sum(watcher.agreed) >= 0.98 * len(watcher.agreed)  # a tie may go either way


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2", "glm4moe", "llama-moe", "minimax-m2"])
def test_routers_and_their_states_are_found(name: str, folder: Path) -> None:
    _routers_agree(name=name, folder=folder)


@in_child
def test_a_router_that_runs_before_attention_is_left_alone(folder: Path) -> None:
    """What its experts compute on is not what it saw."""
    path = make_model("smallthinker", folder)
    watcher = Watcher(read_gguf(path))
    engine = Engine.open(path, ModelConfig(**OPTIONS), recorder=watcher)  # type: ignore[arg-type]
    try:
        Session(engine.decoder).feed(PROMPT)
    finally:
        engine.close()
    assert watcher.layers
    assert all(layer is None or layer.chosen is None for layer in watcher.layers)


def greedy(engine: Engine, n_tokens: int = 100) -> list[int]:
    return small_engines.greedy(Session(engine.decoder), PROMPT, n_tokens)


def plain_tokens(path: Path) -> list[int]:
    engine = Engine.open(path, ModelConfig(**OPTIONS, backend="llama.cpp"))
    try:
        return greedy(engine)
    finally:
        engine.close()


@in_child
def _tokens_are_the_same(name: str, folder: Path) -> None:
    path = make_model(name, folder)
    wanted = plain_tokens(path)
    ways = [("default", prefetch) for prefetch in EXPERT_PREFETCH] + [(policy, "2") for policy in EXPERT_POLICIES[1:]]
    for policy, prefetch in ways:
        options = {**OPTIONS, "expert_policy": policy, "expert_prefetch": prefetch}
        engine = open_at(path, 0.3, options, by_expert=True)
        n_tokens = 100 if prefetch == "auto" else 40  # it compares settings for some tokens each
        try:
            assert greedy(engine, n_tokens) == wanted[:n_tokens], (policy, prefetch)
            use = engine.expert_use
            assert use is not None
            assert use.tokens >= n_tokens - 2
            assert use.unused_bytes <= use.prefetched_bytes
            if prefetch not in ("auto", "off"):
                assert use.prefetched_bytes > 0, (policy, prefetch)
                assert use.tunables["prefetch"] == prefetch
            (streaming,) = (stream for stream in engine._supplied.streams if isinstance(stream, ExpertStreaming))
            streaming._weights._states.check()
        finally:
            engine.close()


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek32"])
def test_tokens_are_the_same_whatever_is_read_ahead(name: str, folder: Path) -> None:
    _tokens_are_the_same(name=name, folder=folder)


@in_child
def _tokens_are_the_same_packed(name: str, folder: Path) -> None:
    path = make_model(name, folder)
    made = pack(path, folder / f"{name}.packed", is_overwritten=True)
    wanted = plain_tokens(path)
    for prefetch in ("off", "2"):
        options = {**OPTIONS, "expert_prefetch": prefetch, "packed": made.path}
        engine = open_at(path, 0.3, options, by_expert=True)
        try:
            (streaming,) = (stream for stream in engine._supplied.streams if isinstance(stream, ExpertStreaming))
            assert streaming.packed is not None
            with mock.patch.object(streaming.packed, "read", wraps=streaming.packed.read) as read:
                assert greedy(engine) == wanted, prefetch
            assert read.call_count > 0
            assert engine.expert_use is not None
            assert engine.expert_use.tunables["packed"] == "on"
            assert any(item.what == "packed" and item.size_bytes > 0 for item in engine.plan.items)
            streaming._weights._states.check()
        finally:
            engine.close()


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek32"])
def test_tokens_are_the_same_packed(name: str, folder: Path) -> None:
    _tokens_are_the_same_packed(name=name, folder=folder)


@in_child
def test_a_packed_file_beside_the_model_is_compared_with_the_model_itself(folder: Path) -> None:
    """Tokens are the same while what is read changes every few of them."""
    path = make_model("qwen3moe", folder, seed=3)
    pack(path)
    wanted = plain_tokens(path)
    with fewest_frames(0.25):  # so that each token has something to read
        engine = open_at(path, 0.25, {**OPTIONS, "expert_prefetch": "off"}, by_expert=True)
    try:
        with mock.patch.object(controller, "MOST_PAIRS", controller.LEAST_PAIRS):  # it is decided within these tokens
            assert greedy(engine) == wanted
        assert engine.expert_use is not None
        assert [found for found in engine.expert_use.decisions if found.tunable == "packed"]
    finally:
        engine.close()


@in_child
def test_a_damaged_block_ends_the_answer_and_says_why(folder: Path) -> None:
    path = make_model("qwen3moe", folder, seed=4)
    made = pack(path, folder / "damaged.packed", is_overwritten=True)
    content = bytearray(made.path.read_bytes())
    for place in range(HEAD.size, HEAD.size + made.packed_bytes, 512):
        content[place] ^= 1
    made.path.write_bytes(content)
    engine = open_at(path, 0.3, {**OPTIONS, "packed": made.path}, by_expert=True)
    try:
        with pytest.raises(PackedFileError, match=r"damaged.*edge-run pack"):
            greedy(engine)
    finally:
        engine.close()
