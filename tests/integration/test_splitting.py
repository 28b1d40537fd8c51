"""Vocabularies whose words go to std::regex: a long one overruns a thread's stack in llama.cpp, and not here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run import ConfigError
from edge_run.runtime.llama.model import LlamaModel
from edge_run.runtime.llama.splitting import LONGEST_RUN
from kit_models import KIT


def split_by(name: str, folder: Path) -> LlamaModel:
    """Return the vocabulary of the kit, whose words are split as `name` says."""
    content = KIT.read_bytes()
    old, new = (len(text).to_bytes(8, "little") + text for text in (b"gpt-2", name.encode()))
    assert content.count(old) == 1
    path = folder / "model.gguf"
    path.write_bytes(content.replace(old, new))
    return LlamaModel([path], mode="vocabulary")


@pytest.fixture(scope="module", params=["gpt-4o", "tekken", "deepseek-v3", "default", "bloom", "exaone-moe"])
def recursive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    with split_by(request.param, tmp_path_factory.mktemp("recursive")) as model:
        yield model


@pytest.mark.parametrize("letter", ["x", "X", ".", " ", "\u6f22", "7", "x.", "\x1c.", "x\u3000", " \u3000"])
def test_a_word_of_any_length_is_split_or_refused(recursive: LlamaModel, letter: str) -> None:
    text = letter * (LONGEST_RUN // len(letter))
    threads, stack_bytes = {*threading.enumerate()}, threading.stack_size()
    assert recursive.count_tokens(text) > 0
    tokens = recursive.tokenize(text[:2000], add_special=False, parse_special=False)
    assert tokens == recursive.tokenize(text[:1000], add_special=False, parse_special=False) * 2 or letter != "x"
    with pytest.raises(ConfigError, match=r"of 131,072 characters.*65,536 at most; break it"):
        recursive.count_tokens(text + text)
    assert {*threading.enumerate()} <= threads
    assert threading.stack_size() == stack_bytes


def test_a_long_text_of_short_words_is_not_refused(recursive: LlamaModel) -> None:
    assert recursive.count_tokens("some words, then.\n" * 20_000) > 20_000


def test_words_with_spaces_within_are_counted_as_llama_cpp_counts_them(tmp_path: Path) -> None:
    with split_by("exaone-moe", tmp_path) as model:
        assert model.count_tokens("a b " * 15_000)
        with pytest.raises(ConfigError, match="break it"):
            model.count_tokens("a b " * 20_000)


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "gpt-2", "smollm", "kimi-k2", "laguna"])
def test_others_have_no_limit(name: str, tmp_path: Path) -> None:
    with split_by(name, tmp_path) as model:
        for letter in ("x", ".", " ", "\u6f22", "7"):
            assert model.count_tokens(letter * 4 * LONGEST_RUN) > 0
