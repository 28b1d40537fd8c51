"""`ManyStream.results` where something came between, and the figures of answers whose prompts were there already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from at_once import PROMPT
from edge_run import ConfigError, Generation, Model, Request, SamplingConfig, TierReadError
from edge_run.base.protocols import BatchToken, Logits
from edge_run.base.results import Piece
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Turn
from kit_models import streamed

PROMPTS = ["Once upon a time", "One day", "Two", "In a town"]


@pytest.fixture
def model(model_of_two: Model) -> Model:
    return model_of_two


def test_results_go_on_after_an_error_with_what_had_ended(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had ended by then was lost, and in the end the rest too, with an error that was not true."""
    decode, n_passes, failing = model._engine.decoder.decode, 0, 4

    def fail_once(batch: Sequence[BatchToken]) -> Logits:
        nonlocal n_passes
        n_passes += 1
        if n_passes == failing:
            raise TierReadError("the drive fails")
        return decode(batch)

    wanted = model.generate_many(PROMPTS, max_tokens=3, temperature=0).results()
    monkeypatch.setattr(model._engine.decoder, "decode", fail_once)
    stream = model.generate_many(PROMPTS, max_tokens=3, temperature=0)
    with pytest.raises(TierReadError, match="the drive fails"):
        stream.results()
    assert stream._ended, "some of them"
    found = stream.results()
    assert [text_of(one) for one in found] == [text_of(one) for one in wanted]
    assert stream.results() == found, "as often as one likes"


def test_answers_go_on_after_a_mistake_between_two_tokens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other answers of the pass waited for ever for a token that nobody had chosen."""
    choose, n_chosen = Continuation.choose, 0

    def fail_once(self: Continuation, logits: Logits) -> Piece | None:
        nonlocal n_chosen
        n_chosen += 1
        if n_chosen == 5:  # of the first of two
            raise RuntimeError("a mistake")
        return choose(self, logits)

    wanted = model.generate_many(PROMPTS, max_tokens=4, temperature=0).results()
    monkeypatch.setattr(Continuation, "choose", fail_once)
    stream = model.generate_many(PROMPTS, max_tokens=4, temperature=0)
    with pytest.raises(RuntimeError, match="a mistake"):
        stream.results()
    assert [text_of(one) for one in stream.results()] == [text_of(one) for one in wanted]


def text_of(found: object) -> str:
    assert isinstance(found, Generation)
    return found.text


def test_who_iterates_over_answers_has_no_results_of_them(model: Model) -> None:
    """All others were computed, for an error that was not true."""
    stream = model.generate_many(PROMPTS, max_tokens=3, temperature=0)
    n_ended = 0
    for _, piece in stream:
        if isinstance(piece, Exception) or piece.generation:
            n_ended += 1
            break
    with pytest.raises(ConfigError, match="iterating gave whole answers already"):
        stream.results()
    n_ended += sum(isinstance(piece, Exception) or piece.generation is not None for _, piece in stream)
    assert n_ended == len(PROMPTS)
    begun = model.generate_many(PROMPTS, max_tokens=3, temperature=0)
    next(begun)  # of the answer's first piece nothing is missed
    assert len(begun.results()) == len(PROMPTS)


def test_half_a_character_in_one_prompt_ends_no_other(model: Model) -> None:
    """It was no error of ours, and ended all; asked again, all was to begin with the same prompt."""
    found = model.generate_many([PROMPT, "Once \ud83d", "One day"], max_tokens=2, temperature=0).results()
    assert isinstance(found[1], ConfigError)
    assert "U+D83D" in str(found[1])
    assert [answer(one).completion_tokens for one in found[::2]] == [2, 2]


def test_a_last_token_that_is_read_alone_is_of_its_prompt(grown: Path) -> None:
    """Prompts that were there already had no speed, and what was read for their last token counted for the next."""
    with Model(grown, **{**streamed(), "sequences": 2, "context_tokens": 512}) as model:
        many = model.generate_many([PROMPT] * 3, max_parallel=1, max_tokens=2, temperature=0)
        first, *later = map(answer, many.results())
        assert first.cached_tokens == 0
        plan = model.plan
        least_bytes = plan.streamed_bytes_per_pass - plan.window_bytes - plan.lent_bytes  # the rest may be there before
        for one in later:
            assert one.cached_tokens == one.prompt_tokens - 1
            assert one.prefill_tokens_per_s > 0
            assert one.decode_tokens_per_s > 0
            for_prompt_bytes = one.io.bytes_read - one.io.bytes_per_token
            assert min(for_prompt_bytes, one.io.bytes_per_token) >= least_bytes > 0, "of two passes one is the prompt's"
        (single,) = map(answer, model.generate_many([PROMPT], max_tokens=1, temperature=0).results())
        assert single.io.bytes_read > 0
        assert single.io.bytes_per_token == 0
        assert single.prefill_tokens_per_s > 0
        assert single.decode_tokens_per_s == 0


def answer(found: object) -> Generation:
    assert isinstance(found, Generation)
    return found


def test_greedy_answers_open_no_samplers(model: Model) -> None:
    with model.open_batch() as batch:
        greedy, drawn = (model.begin(Request(PROMPT, 3, SamplingConfig(temperature=one))) for one in (0, 1))
        for text in (greedy, drawn):
            batch.submit(text, Turn())
        while not batch.is_idle:
            batch.advance()
    assert len(greedy.tokens) == 3
    assert greedy._sampler._opened_chain is None
    assert drawn._sampler._opened_chain is not None


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_prompts_that_raised_are_not_complete(model: Model, kind: type[BaseException]) -> None:
    """A generator that raised has no more prompts: asked again, the answers ended as if these had been all."""

    def prompts() -> Iterator[str]:
        yield from PROMPTS[:3]
        raise kind("the drive of the prompts fails")

    wanted = [text_of(one) for one in model.generate_many(PROMPTS[:3], max_tokens=3, temperature=0).results()]
    stream, texts = model.generate_many(prompts(), max_tokens=3, temperature=0), [""] * 3
    n_raised = 0
    while True:
        try:
            if (found := next(stream, None)) is None:
                break
            number, piece = found
            assert isinstance(piece, Piece)
            texts[number] += piece.text
        except kind:
            n_raised += 1
    assert n_raised == 2, "when it came, and before the end"
    assert texts == wanted, "which were asked for before"
    results = model.generate_many(prompts(), max_tokens=3, temperature=0)
    for _ in range(2):
        with pytest.raises(kind, match="the drive of the prompts fails"):
            results.results()
    assert [text_of(one) for one in results.results()] == wanted, "what was answered is not lost"


def test_prompts_that_come_after_an_error_are_answered(model: Model) -> None:
    class Prompts:
        """Fails once between two prompts, as a drive or a server may."""

        def __init__(self) -> None:
            self.left = [PROMPTS[0], None, PROMPTS[1]]

        def __iter__(self) -> Prompts:
            return self

        def __next__(self) -> str:
            if not self.left:
                raise StopIteration
            if (found := self.left.pop(0)) is None:
                raise OSError("says nothing")
            return found

    stream = model.generate_many(Prompts(), max_tokens=3, temperature=0)
    with pytest.raises(OSError, match="says nothing"):
        stream.results()
    assert len(stream.results()) == 2
