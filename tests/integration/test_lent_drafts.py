"""A draft model's keys and values take memory as they are written, and what they do not take holds the model's weights.

Conversations grow, are cut and begin anew while the model streams. What is chosen, and by which logits, is what it is
without a draft model: speculation is exact here.
"""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from drafted_talks import OPTIONS, Talk, check_rows, drafter, streamed
from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled
from edge_run.base.units import MIB
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.decoding.twin_context import sparse_cells
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama.context_shape import context_shape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.runtime.speculation.draft_model import DraftModel
from edge_run.runtime.speculation.drafting import Acceptance, WantedGuesses
from edge_run.runtime.speculation.overlap import Overlap
from edge_run.tiers import _libc
from in_child import in_child
from talks import TEXT
from tiny_models import make_model


def talk_of_any_length(talk: Talk) -> None:
    """It grows, is cut short, grows again and begins anew."""
    talk.go_on(TEXT[:400], 12)
    talk.go_on(TEXT[:900], 12)
    talk.go_on(TEXT[:150] + TEXT[:20], 8)
    talk.go_on(TEXT[:150] + TEXT[:300], 8)
    talk.go_on(TEXT[700:720], 20)


@pytest.mark.parametrize(("name", "quantisation"), [("llama", "Q4_0"), ("gemma3", "Q8_0")])
@in_child
def test_what_a_draft_model_has_not_written_holds_weights(name: str, quantisation: str, folder: Path) -> None:
    """One whose cache branches, and one that guesses chains and has a sliding window."""
    path, draft = make_model(name, folder, scale=4), drafter(name, folder, quantisation, scale=4)
    with streamed(path, draft) as engine:
        talk = Talk(engine)
        talk_of_any_length(talk)
        witness = talk.witness
        assert witness
        assert engine.memory_use.peak_bytes <= engine.budget_bytes
        assert talk.session.speculation().accepted > 0
        assert witness.lender._cells
        own_bytes = witness.lender._cells._streams[0].bytes_for(engine.plan.context_tokens)
        assert engine.plan.lent_bytes > 1.3 * own_bytes, "the model's own keys and values are not all"
        longest = max(witness.draft_bytes[:24])
        assert min(witness.draft_bytes[-20:]) < longest / 2, "given back"
        assert min(witness.counts[12:24]) < max(witness.counts[-20:])
    check_rows(path, talk, talk_of_any_length)


@pytest.mark.parametrize("is_overlapped", [False, True])
@in_child
def test_guesses_beside_a_pass_find_their_room_made(folder: Path, is_overlapped: bool) -> None:
    """A pass never divides what a draft model has that goes on meanwhile."""
    made_by = set()
    path, draft = make_model("llama", folder), drafter("llama", folder, "Q4_0")
    aside = DraftModel.draft_aside
    DraftModel.draft_aside = lambda model, *a: aside(model, *a[:-1], threading.Event())  # type: ignore[method-assign, assignment]
    Overlap.is_on = is_overlapped  # type: ignore[method-assign, assignment]
    with streamed(path, draft) as engine:
        talk = Talk(engine)
        assert engine.draft
        make_room = engine.draft.make_room

        def noted(*tokens: int) -> bool:
            made_by.add(threading.current_thread())
            return make_room(*tokens)

        engine.draft.make_room = noted
        talk_of_any_length(talk)
        assert engine.memory_use.peak_bytes <= engine.budget_bytes
    assert made_by == {threading.main_thread()}
    check_rows(path, talk, talk_of_any_length)


@in_child
def test_a_stop_while_weights_give_back_ends_the_guessing(folder: Path) -> None:
    """The draft model guesses nothing then, and the pass is what is cancelled; later both go on."""
    path, draft = make_model("llama", folder), drafter("llama", folder, "Q4_0")
    with streamed(path, draft) as engine:
        talk = Talk(engine)
        talk.go_on(TEXT[:200], 3)
        weights = engine._supplied.streams[0].weights
        unpin = weights.unpin

        def stop(chunks: object) -> None:
            raise Cancelled("stopped")

        weights.unpin = stop
        assert engine.draft
        text = [*TEXT[:300], *TEXT[:3000]]
        assert engine.draft.draft_many({0: text}, WantedGuesses(4, 8, Acceptance())) == {}
        weights.unpin = unpin
        talk.go_on(TEXT[:900], 12)
        assert engine.memory_use.peak_bytes <= engine.budget_bytes

    def again(wanted: Talk) -> None:
        wanted.go_on(TEXT[:200], 3)
        wanted.go_on(TEXT[:900], 12)

    check_rows(path, talk, again)


@in_child
def test_a_draft_model_opens_with_a_context_that_does_not_fit_when_full(folder: Path) -> None:
    """Its own keys and values take 256 MiB when full, and those of the model as much."""
    path, draft = make_model("llama", folder), drafter("llama", folder, "Q4_0")
    options = {**OPTIONS, "context_tokens": 131_072, "draft": draft}
    before_bytes = process_memory().resident_bytes
    with closing(Engine.open(path, ModelConfig(**options, memory=before_bytes + 220 * MIB))) as engine:
        assert 512 <= engine.plan.context_tokens < 131_072 == engine.plan.wanted_context_tokens
        assert engine.draft
        assert engine.draft.context_tokens >= engine.plan.context_tokens
        items = {item.what: item.size_bytes for item in engine.plan.items}
        assert sum(items.values()) <= engine.budget_bytes


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@in_child
def test_the_cells_of_a_context_lie_as_those_of_its_twin(name: str, folder: Path) -> None:
    shape = context_shape(ModelConfig(context_tokens=16_384, micro_batch_tokens=32, threads=1, sequences=2), 0, 1)
    driver = Driver()
    with (
        LlamaModel([make_model(name, folder)]) as model,
        closing(LlamaContext(model, shape, driver.callback, is_sparse=True)) as context,
        closing(LocalDecoder(model, context, driver, shape)) as decoder,
    ):
        found = sparse_cells(model, shape, context)
        decoder.map_graph()
        inside = [
            tensor
            for tensor in driver.take_flow().cells
            if any(start - _libc.PAGE <= tensor.address < start + length for start, length in context.sparse_caches)
        ]
    assert found
    assert inside
    assert list(found.tensors) == inside
