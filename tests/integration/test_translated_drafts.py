"""A draft model with another vocabulary: its guesses come true, and change no token.

The drafter is the bundled model with its tokens numbered anew: the same model, whose guesses are right where they are
translated right.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from eager import Eager
from edge_run import Model
from edge_run.base.results import Generation, Piece
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.speculation.drafting import Guess
from edge_run.runtime.speculation.overlap import Overlap
from edge_run.runtime.speculation.translation import Translation
from edge_run.tiers.gguf import read_gguf
from kit_models import KIT

N_FIRST = 3  # tokens that keep their numbers: BOS and the like
OPTIONS: dict[str, Any] = {"threads": 1, "context_tokens": 512, "micro_batch_tokens": 32, "draft_tokens": 15}
PROMPT = "It was a dark evening, and the old man at the door said: \u201cna\u00efve \u2603\u201d \u2014 and"


def _reversed(blocks: list[bytes]) -> bytes:
    return b"".join([*blocks[:N_FIRST], *reversed(blocks[N_FIRST:])])


def renumber(source: Path, target: Path) -> Path:
    """Write `source` with all tokens but the first ones in the opposite order, and the rows of its matrices alike."""
    gguf, data = read_gguf(source), bytearray(source.read_bytes())
    entries = {entry.key: entry for entry in gguf.entries}
    head = 4 + 4 + 8  # of an array: its type, that of its elements, their number
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        entry = entries[key]
        start, end = entry.start + 8 + len(key) + head, entry.start + entry.size_bytes
        found, place = [], start
        while place < end:
            length = 8 + struct.unpack_from("<Q", data, place)[0] if key.endswith("tokens") else 4
            found.append(bytes(data[place : place + length]))
            place += length
        data[start:end] = _reversed(found)
    for tensor in gguf.tensors:
        if tensor.name in ("token_embd.weight", "output.weight"):
            n_bytes = tensor.size_bytes // tensor.shape[1]
            rows = [
                bytes(data[at : at + n_bytes])
                for at in range(tensor.offset, tensor.offset + tensor.size_bytes, n_bytes)
            ]
            data[tensor.offset : tensor.offset + tensor.size_bytes] = _reversed(rows)
    target.write_bytes(data)
    return target


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return renumber(KIT, tmp_path_factory.mktemp("renumbered") / "other.gguf")


def answer(n_tokens: int = 48, **options: Any) -> Generation:
    with Model(KIT, **OPTIONS, **options) as model:
        return model.generate(PROMPT, max_tokens=n_tokens, temperature=0).result()


def test_it_is_the_same_model_with_other_tokens(renumbered: Path) -> None:
    with Model(KIT, **OPTIONS) as kit, Model(renumbered, **OPTIONS) as other:
        tokens = kit.prompt_tokens(PROMPT)
        assert tokens != other.prompt_tokens(PROMPT)
        answers = [model.generate(PROMPT, max_tokens=24, temperature=0).result() for model in (kit, other)]
        assert answers[0].token_ids != answers[1].token_ids
        assert kit.detokenize(answers[0].token_ids) == other.detokenize(answers[1].token_ids)


def test_its_guesses_come_true_and_change_nothing(renumbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_setup, "WidthControl", Eager)
    monkeypatch.setattr(Overlap, "is_on", False)  # beside a pass there are as many guesses as it leaves time for
    plain = answer()
    drafted = answer(draft=renumbered, speculate="draft", exact=True)
    assert drafted.token_ids == answer(exact=True).token_ids
    assert "through text" in drafted.speculation.reason
    assert drafted.speculation.tokens_per_pass > 3
    own = answer(draft=KIT, speculate="draft", exact=True)
    assert drafted.speculation.accepted >= 0.9 * own.speculation.accepted
    assert len(plain.token_ids) == len(drafted.token_ids)


def test_several_answers_share_it(renumbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_setup, "WidthControl", Eager)
    with Model(KIT, draft=renumbered, speculate="draft", exact=True, sequences=2, **OPTIONS) as model:
        pieces = model.generate_many([PROMPT, "Once upon a time"], max_tokens=16, temperature=0)
        made = {number: piece.generation for number, piece in pieces if isinstance(piece, Piece) and piece.generation}
    assert [len(made[number].token_ids) for number in (0, 1)] == [16, 16]
    assert made[0].token_ids == answer(16, exact=True).token_ids
    assert all(generation.speculation.accepted > 4 for generation in made.values())


class TestTranslation:
    """What becomes of texts and guesses."""

    @pytest.fixture
    def models(self, renumbered: Path) -> Any:
        with Model(renumbered, **OPTIONS) as draft, Model(KIT, **OPTIONS) as target:
            yield draft, target, Translation(draft._opened.model, target._opened.model)

    def test_a_long_text_is_the_same_text(self, models: Any) -> None:
        draft, target, translation = models
        text = "It was a dark evening. " * 40
        tokens = target.prompt_tokens(text)
        found = translation.text(tokens)
        assert len(tokens) > 128
        assert draft.detokenize(found) == text
        assert found[0] == draft.prompt_tokens("")[0]

    def test_nothing_is_guessed_inside_a_character(self, models: Any) -> None:
        _, target, translation = models
        tokens = target.tokenize("\u2603", add_special=False)
        assert len(tokens) > 1, "this character has a token of its own"
        assert translation.text(tokens[:-1]) is None
        assert translation.text(tokens) is not None

    def test_a_guess_is_worth_what_the_path_with_its_bytes_is(self, models: Any) -> None:
        draft, target, translation = models
        path = tuple(draft.tokenize(" old man", add_special=False))
        guesses = {path[: n + 1]: Guess(0.5 ** (n + 1), ("draft", n, 0), 0.5) for n in range(len(path))}
        found = translation.guesses(guesses, 16)
        tokens = target.tokenize(" old man", add_special=False)
        assert sorted(found) == [tuple(tokens[: n + 1]) for n in range(len(tokens))]
        assert [found[key].value for key in sorted(found)] == [0.5 ** (n + 1) for n in range(len(tokens))]
        assert sorted(translation.guesses(guesses, 1)) == [(tokens[0],)]
