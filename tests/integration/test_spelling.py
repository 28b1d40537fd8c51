"""Vocabularies that cannot write every text: llama.cpp ends the process over it, edge-run refuses the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run import ConfigError, Model
from mutations import Entry, parse
from tiny_models import N_VOCAB

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
STRING, INT32, ARRAY = 8, 5, 9
LETTERS = ["\u2581", "o", "n", "c", "e", "on", "ce", "once", "\u2581once"]


def with_vocabulary(source: Path, target: Path, tokens: list[tuple[str, int]]) -> Path:
    """Write `source` to `target` with an SPM vocabulary: tokens and their types, filled up with words of no letter."""
    tokens = tokens + [(f"\u4e00{number}", NORMAL) for number in range(N_VOCAB - len(tokens))]
    texts, types = [text for text, _ in tokens], [kind for _, kind in tokens]
    parts = parse(source.read_bytes())
    parts.entries = [entry for entry in parts.entries if not entry.key.startswith("tokenizer.")]
    parts.entries += [
        Entry("tokenizer.ggml.model", STRING, "llama"),
        Entry("tokenizer.ggml.tokens", ARRAY, texts, STRING),
        Entry("tokenizer.ggml.scores", ARRAY, [float(len(text)) for text in texts], 6),
        Entry("tokenizer.ggml.token_type", ARRAY, types, INT32),
        Entry("tokenizer.ggml.add_space_prefix", 7, False),
    ]
    target.write_bytes(parts.write())
    return target


SPECIAL = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<|end|>", CONTROL)]


@pytest.fixture
def poor(llama: Path, tmp_path: Path) -> Path:
    """A model whose vocabulary has some letters and no bytes."""
    return with_vocabulary(llama, tmp_path / "poor.gguf", SPECIAL + [(text, NORMAL) for text in LETTERS])


def test_a_poor_vocabulary_writes_what_it_can(poor: Path, tmp_path: Path) -> None:
    with Model(poor, memory="2GiB", cache_folder=tmp_path / "cache") as model:  # a new file, so it is tried
        tokens = model.tokenize("once once", add_special=False)
        assert model.detokenize(tokens) == "once once"
        assert model.tokenize("once<|end|>", add_special=False, parse_special=True)[-1] == 3
        assert model.generate("once", max_tokens=2, ignore_eos=True).result().completion_tokens == 2


@pytest.mark.parametrize("text", ["on\u00e9", "ona", "once\n", "on\udcff", "once \U0001f600\U0001f600"])
def test_what_it_cannot_write_is_refused(poor: Path, tmp_path: Path, text: str) -> None:
    with Model(poor, memory="2GiB", cache_folder=tmp_path / "cache") as model:
        missing = next(character for character in text if character not in "once ")
        with pytest.raises(ConfigError, match=rf"no token for .*U\+{ord(missing):04X}\); leave out"):
            model.generate(text)
        assert model.tokenize("once")  # and it goes on


def test_byte_tokens_wherever_they_are_write_everything(llama: Path, tmp_path: Path) -> None:
    tokens = SPECIAL + [(text, NORMAL) for text in LETTERS] + [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    with Model(
        with_vocabulary(llama, tmp_path / "rich.gguf", tokens), memory="2GiB", cache_folder=tmp_path / "cache"
    ) as model:
        text = "once \u00e9\n\U0001f600"
        assert model.detokenize(model.tokenize(text, add_special=False)) == text
