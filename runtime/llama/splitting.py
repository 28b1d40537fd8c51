"""How llama.cpp splits a text into words before it looks for tokens, which can take more stack than there is.

Vocabularies of the BPE kind split by a regular expression. For some of these llama.cpp has a function of its own; the
others go to std::regex, which calls itself for each character of a word or of a run of spaces: some 330 bytes each, so
that one of 26,000 characters (a picture in base64) overruns a stack of 8 MiB and ends the process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import chain
from typing import Any, TypeVar

from edge_run.base.errors import ConfigError
from edge_run.base.interrupt import JoinedThread, join_all
from edge_run.base.units import KIB, MIB
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L

LONGEST_RUN = 64 * KIB  # characters
_ANY_STACK_RUN = 1500  # what any thread's stack holds
_STACK_BYTES = LONGEST_RUN * KIB + MIB  # addresses: what is not reached takes no memory
_SPACES = re.compile(r"\s+")
_WORDS = re.compile(r"[^\t-\r ]+")  # what is a space beyond ASCII is none to all of its expressions
_LINES = re.compile(r"[^\t-\r]+")
_SAFE = (
    "a.x-4.0 chatglm-bpe codeshell command-r dbrx deepseek-r1-qwen exaone exaone4 f2llmv2 falcon-h1 falcon3 gemma4 "
    "gigachat glm4 glm5 gpt-2 granite-docling granite-embed-multi-311m grok-2 hunyuan jais jina-de jina-es jina-v1-en "
    "jina-v2-code jina-v2-de jina-v2-es jina-v5-nano kimi-k2 kormo laguna lfm2 llama-bpe llama-v3 llama3 megrez mellum "
    "mellum2 midm-2.0 minerva-7b modern-bert mpt olmo phi-2 pixtral qwen2 qwen35 refact roberta-bpe sarvam-moe "
    "smaug-bpe smollm solar-open stablelm2 starcoder trillion"
)
_OWN_FUNCTION = frozenset(_SAFE.split())
_SPACES_WITHIN = frozenset({"exaone-moe"})  # letters with spaces between them are one word

_T = TypeVar("_T")


class Splitting:
    """How a vocabulary splits. Thread-safe."""

    def __init__(self, model: Any, vocab: Any) -> None:
        name = ggml.model_metadata(model, "tokenizer.ggml.pre") or "default"
        is_bpe = L.llama_vocab_type(vocab) == L.LLAMA_VOCAB_TYPE_BPE
        self._recurses = is_bpe and name not in _OWN_FUNCTION
        self._is_one_word = name in _SPACES_WITHIN

    def call(self, text: str, function: Callable[[], _T]) -> _T:
        """Return what `function` returns, which tokenizes `text`. Raises ConfigError for what no stack would hold."""
        run = self._longest_run(text) if self._recurses else 0
        if run > LONGEST_RUN:
            raise ConfigError(
                f"the text has a word (or a run of spaces) of {run:,} characters, and the vocabulary of this model "
                f"takes {LONGEST_RUN:,} at most; break it, or leave it out"
            )
        return function() if run <= _ANY_STACK_RUN else _on_large_stack(function)

    def _longest_run(self, text: str) -> int:
        words = _LINES if self._is_one_word else _WORDS
        return max(map(len, chain(words.findall(text), _SPACES.findall(text))), default=0)


_CHANGING = threading.Lock()


def _on_large_stack(function: Callable[[], _T]) -> _T:
    """Return what `function` returns on a thread of its own, or raise what it raises."""
    found = Future[_T]()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    thread = JoinedThread(run, "edge-run-tokenize")
    with _CHANGING:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    join_all([thread])  # after Ctrl-C too: it uses the vocabulary
    return found.result()
