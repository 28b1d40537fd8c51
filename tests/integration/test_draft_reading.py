"""What a draft model reads of texts: it can be stopped, it is whole when it is, and it serves those it was read for.

Beyond its own context it reads none.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from eager import Eager
from edge_run import Cancelled, Model
from edge_run.base.protocols import BatchToken
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.generation.request import Request, Turn
from edge_run.runtime.llama.model import LlamaContext
from edge_run.runtime.speculation.drafting import Acceptance, WantedGuesses
from tiny_models import make_model

RESIDENT: dict[str, Any] = {"threads": 1, "context_tokens": 256, "micro_batch_tokens": 32, "draft_tokens": 15}
TWO = WantedGuesses(2, 2, Acceptance())


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every conversation speculate always."""
    monkeypatch.setattr(speculation_setup, "WidthControl", Eager)


def test_a_cancel_ends_what_the_draft_model_reads(kit: Path) -> None:
    """A long prompt takes it long; the next guesses are made as ever."""
    text = [3 + 7 * i % 300 for i in range(900)]
    with Model(kit, draft=kit, **{**RESIDENT, "context_tokens": 1024}) as model:
        engine = model._opened
        assert engine.draft
        decode, n_passes = LlamaContext.decode, 0

        def cancelling(context: LlamaContext, batch: Any) -> int:
            nonlocal n_passes
            n_passes += 1
            if n_passes == 2:
                engine.interrupt.cancel()
            return decode(context, batch)

        with mock.patch.object(LlamaContext, "decode", cancelling), pytest.raises(Cancelled):
            engine.draft.draft_many({0: text}, TWO)
        assert n_passes == 2
        assert engine.draft.draft_many({0: text}, TWO)[0]


def test_a_token_that_only_the_target_has_ends_no_guessing(kit: Path) -> None:
    """Fine-tunes have some tokens more than the small model that they are guessed by."""
    with Model(kit, draft=kit, **RESIDENT) as model:
        draft = model._opened.draft
        assert draft
        beyond = draft.model.vocabulary + 5
        text = [3 + 7 * i % 300 for i in range(40)]
        assert draft.n_unread(0, [*text, beyond]) > 0
        known = draft.draft_many({0: [*text, 0, 9, 11]}, TWO)[0]
        assert draft.draft_many({0: [*text, beyond, 9, 11]}, TWO)[0] == known != {}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_the_draft_model_read_serves_its_salt_only(kit: Path, is_shared: bool) -> None:
    """Else others could tell from the time to the second token that it was asked before."""
    text = [3 + 7 * i % 300 for i in range(60)]
    decode, n_read = LocalDecoder.decode, list[int]()
    with Model(kit, draft=kit, speculate="draft", **RESIDENT) as model:
        draft = model._opened.draft
        assert draft

        def counted(decoder: LocalDecoder, batch: Sequence[BatchToken]) -> Any:
            if decoder is draft._decoder:
                n_read.append(len(batch))
            return decode(decoder, batch)

        with mock.patch.object(LocalDecoder, "decode", counted):
            for salt, is_known in (("a", False), ("a", True), ("b", False)):
                n_read.clear()
                request = Request(text, 4, SamplingConfig(temperature=0), Turn(salt=salt))
                if is_shared:
                    list(model.generate_many([request]))
                else:
                    model._start(request).result()
                assert (max(n_read) < 50) == is_known, salt


def test_ctrl_c_while_the_draft_model_has_room_made_waits_until_it_is_made(kit: Path) -> None:
    with Model(kit, draft=kit, **RESIDENT) as model:
        draft, was_made = model._opened.draft, False
        assert draft

        def make_room(kept_tokens: int, most_tokens: int) -> bool:
            nonlocal was_made
            signal.raise_signal(signal.SIGINT)
            was_made = True
            return True

        draft.make_room = make_room
        for guess in (
            lambda: draft.draft_many({0: [1, 2, 3]}, TWO),
            lambda: draft.prepare({0: [1, 2, 3, 4]}, 2),
        ):
            was_made = False
            with pytest.raises(KeyboardInterrupt):
                guess()
            assert was_made


@pytest.mark.usefixtures("eager")
def test_beyond_the_draft_models_context_it_does_not_guess(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_model("llama", folder)
    short = make_model("llama", folder, seed=0, quantisation="Q8_0")
    monkeypatch.setattr("edge_run.runtime.inspection.draft_file.trained_context_tokens", lambda gguf: 256)
    options, prompt = {**RESIDENT, "context_tokens": 512, "exact": True}, [3 + 7 * i % 300 for i in range(200)]
    with Model(target, draft=short, speculate="draft", **options) as model:
        assert "256 tokens" in model.speculation.reason
        answer = model.generate(prompt, max_tokens=120, temperature=0).result()
        assert 0 < answer.speculation.accepted < 56
    with Model(target, **options) as model:
        assert answer.token_ids == model.generate(prompt, max_tokens=120, temperature=0).result().token_ids
