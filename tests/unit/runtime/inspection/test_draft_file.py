"""Whether a draft model's tokens are the target's, as the two files say: then it is opened without a vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, ModelFileMissing
from edge_run.base.units import GIB
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.inspection.draft_file import MOST_TOKENS_MISSING, DraftFile, has_same_tokens
from edge_run.tiers.gguf import GgufModel, read_gguf
from gguf_files import array, container, string_entry
from tiny_models import make_model

WORDS = tuple(f"word {number}" for number in range(300))


def model(path: Path, words: tuple[str, ...] = WORDS, tokenizer: str = "gpt2") -> GgufModel:
    """Return what is read of a file with these tokens, in a place of the file that depends on its name."""
    entries = string_entry("general.name", path.stem)
    entries += string_entry("tokenizer.ggml.model", tokenizer) + array("tokenizer.ggml.tokens", words)
    path.write_bytes(container(entries, 3))
    return read_gguf(path)


@pytest.mark.parametrize("n_more", [0, 1, MOST_TOKENS_MISSING])
def test_tokens_are_the_same_but_for_some_at_the_end(n_more: int, tmp_path: Path) -> None:
    more = tuple(f"filler {number}" for number in range(n_more))
    one, other = model(tmp_path / "one.gguf"), model(tmp_path / "another one.gguf", (*WORDS, *more))
    assert has_same_tokens(one, other)
    assert has_same_tokens(other, one)


@pytest.mark.parametrize(
    ("words", "tokenizer"),
    [
        ((*WORDS[:-1], "word 298"), "gpt2"),
        (("", *WORDS[1:]), "gpt2"),
        ((*WORDS, *("a" * (MOST_TOKENS_MISSING + 1))), "gpt2"),
        (WORDS, "llama"),
        ((), "gpt2"),
    ],
)
def test_other_tokens_are_not_the_same(words: tuple[str, ...], tokenizer: str, tmp_path: Path) -> None:
    one, other = model(tmp_path / "one.gguf"), model(tmp_path / "other.gguf", words, tokenizer)
    assert not has_same_tokens(one, other)
    assert not has_same_tokens(other, one)


def test_a_file_without_tokens_has_those_of_none(tmp_path: Path) -> None:
    path = tmp_path / "without.gguf"
    path.write_bytes(container())
    assert not has_same_tokens(read_gguf(path), read_gguf(path))


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    one, other = model(tmp_path / "one.gguf"), model(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").unlink()
    with pytest.raises(ModelFileMissing, match=r"other\.gguf: cannot be read"):
        has_same_tokens(one, other)


def test_a_draft_model_on_a_gpu_takes_no_memory_of_the_machine(tmp_path: Path) -> None:
    path, config = make_model("llama", tmp_path), ModelConfig(context_tokens=256, threads=1, cache_folder=tmp_path)
    file = DraftFile.read(path, config, read_gguf(path), is_tried=False)
    file = replace(file, known=replace(file.known, buffer_bytes=GIB))
    budget_bytes = process_memory().resident_bytes + GIB // 2
    with pytest.raises(BudgetError, match="too small for the draft model"):
        file.check_budget(budget_bytes)
    file.check_budget(budget_bytes, moved_bytes=file.size_bytes)
