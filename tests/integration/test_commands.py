"""Commands of a member, whatever is in them: carried out or refused, and nothing is written where nothing may be."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from commands import OPTIONS, message, wild_commands
from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, ContextFull, EdgeRunError
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.driver import PassShape
from edge_run.runtime.mesh.commands import carry_out
from edge_run.runtime.mesh.messages import read_command
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.slice import Share
from guarded import GuardedBatch
from in_child import in_child
from slices import QueueTransport
from tiny_models import make_model


@contextlib.contextmanager
def guarded(folder: Path, name: str = "llama") -> Iterator[tuple[SliceEngine, GuardedBatch]]:
    """A slice engine that computes all of a model, with canaries after llama.cpp's batch."""
    engine = SliceEngine.open(make_model(name, folder), ModelConfig(memory="2GiB", **OPTIONS, chunk_bytes=16384))
    engine.assign(Share(("w",) * len(engine.layout.units), "w"), QueueTransport({}, "w"))
    guard = GuardedBatch(engine.decoder)
    try:
        yield engine, guard
    finally:
        guard.close()
        engine.close()


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon-h1"])
@in_child
def test_whatever_a_member_commands_is_carried_out_or_refused(name: str, folder: Path) -> None:
    with guarded(folder, name) as (engine, guard):
        done = {True: 0, False: 0}

        @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(wild_commands())
        def try_out(command: tuple[str, list[int]]) -> None:
            is_done = False
            with contextlib.suppress(EdgeRunError):
                carry_out(engine, read_command(message(*command), engine.decoder.limits))
                is_done = True
            guard.check()
            done[is_done] += 1

        try_out()
        assert min(done.values()) > 30, f"both happen: {done}"
        engine.decoder.clear()
        assert np.isfinite(engine.decoder.decode([BatchToken(1, 0, 0, True)])).all(), "it still computes"


@in_child
def test_4000_branches_end_in_one_line(folder: Path) -> None:
    """As an attack had them: the block for them had 12 bytes, and what was written after it was its sender's choice."""
    with guarded(folder) as (engine, guard):
        for n_branches in (3, 64, 4000):
            numbers = [1, 0, 0, 1, n_branches, *[0x41414141] * n_branches]
            with pytest.raises(EdgeRunError) as caught:
                carry_out(engine, read_command(message("decode", numbers), engine.decoder.limits))
            assert "\n" not in str(caught.value)
            guard.check()


WILD_TOKENS = [
    BatchToken(1, 0, 0, True, (0x41414141,) * 4000),
    BatchToken(1, 0, 0, True, (1, 1)),
    BatchToken(1, 0, 0, True, (0,)),
    BatchToken(-1, 0),
    BatchToken(1 << 32, 0),
    BatchToken(10**9, 0),
    BatchToken(True, 0),
    BatchToken(1, -1),
    BatchToken(1, 2**31 - 1),
    BatchToken(1, 10**4000),
    BatchToken(1, 0.5),  # type: ignore[arg-type]
    BatchToken(1, 0, 3),
    BatchToken(1, 0, -1),
    BatchToken(1, 0, "0"),  # type: ignore[arg-type]
]


@in_child
def test_a_caller_of_ours_with_a_wild_batch_is_told_so(folder: Path) -> None:
    with guarded(folder) as (engine, guard):
        decoder = engine.decoder
        for token in WILD_TOKENS:
            for batch in ([token], [BatchToken(1, 0), token]):
                for call in (decoder.decode, decoder.follow, decoder.take_back):
                    with pytest.raises((ConfigError, ContextFull)):
                        call(batch)
        for shape in ((0, 0), (9, 1), (4000, 1), (2, 3), (8, 8), (-1, 0), (1, -1), (2**40, 1)):
            with pytest.raises(ConfigError):
                engine.learn(PassShape(*shape))
            with pytest.raises(ConfigError):
                decoder.map_graph(PassShape(*shape))
        beyond = decoder.limits.context_tokens + 1
        calls = {
            "rewind": lambda wild: decoder.rewind(wild, 0),
            "rewind to": lambda wild: decoder.rewind(0, beyond if wild == 3 else wild),
            "branch of": lambda wild: decoder.branch(wild, [1]),
            "branch to": lambda wild: decoder.branch(1, [wild]),
            "keep": lambda wild: decoder.keep(wild, 0, 1, ()),
            "keep as": lambda wild: decoder.keep(0, 0, wild, ()),
            "keep from": lambda wild: decoder.keep(0, beyond if wild == 3 else wild, 1, ()),
            "keep without": lambda wild: decoder.keep(0, 0, 1, [wild]),
        }
        for wild, (name, call) in itertools.product((-1, 3, 2**31, 2**32, "a", True), calls.items()):
            print(name, repr(wild))
            with pytest.raises(ConfigError):
                call(wild)
        with pytest.raises(ConfigError, match="no tokens"):
            decoder.decode([])
        with pytest.raises(ConfigError, match="asks for the logits"):
            decoder.decode([BatchToken(1, i, 0, True) for i in range(8)])
        guard.check()


@in_child
def test_a_model_is_mapped_for_so_many_shapes_at_most(folder: Path) -> None:
    """Each graph that a member has this device learn takes memory."""
    from edge_run.runtime.slices import maps

    maps.MOST_MAPS = 4
    with guarded(folder) as (engine, _):
        for tokens in (2, 3, 4):
            engine.learn(PassShape(tokens, 1))
        with pytest.raises(EdgeRunError, match="over 4 graphs"):
            engine.learn(PassShape(5, 1))
        engine.learn(PassShape(4, 1))


@in_child
def test_passes_of_one_token_at_most_learn_other_graphs_too(folder: Path) -> None:
    """Another shape is mapped before: where a pass has room for one token, one of two would be written beyond it."""
    engine = SliceEngine.open(make_model("llama", folder), ModelConfig(memory="2GiB", **{**OPTIONS, "sequences": 1,
                         "outputs_per_pass": 1, "micro_batch_tokens": 1, "chunk_bytes": 16384}))  # fmt: skip
    guard = GuardedBatch(engine.decoder)
    engine.learn(PassShape(1, 0))
    engine.learn(PassShape(1, 1))
    guard.check()
    guard.close()
    engine.close()
