"""Grammars that an answer must follow: llama.cpp's, on a vocabulary.

A grammar is a stranger's program: `LocalGrammar` runs it here, where nested parentheses may end the process and
ambiguous rules take all memory at any token. So `room.py` has it run in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.grammars.schema_grammar import JSON_SCHEMA
from edge_run.runtime.llama import _ggml as ggml

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data

_stderr_lock = threading.Lock()


class LocalGrammar:
    """llama.cpp's grammar in this process, which stands after the tokens accepted so far. Not thread-safe.

    Raises ConfigError for text that llama.cpp cannot use.
    """

    def __init__(self, vocab: Any, n_vocab: int, text: str, name: str = "grammar") -> None:
        """Open GBNF on llama.cpp's vocabulary, which must outlive this.

        name: what errors call it.
        """
        self._n_vocab = n_vocab
        self._single = np.zeros(1, CANDIDATE)
        self._handle = _open(vocab, text, name)

    def fits(self, token: int) -> bool:
        """Return whether `token` may come next."""
        self._single[0] = (token, 1.0, 0.0)
        ggml.L.llama_sampler_apply(self._handle, ggml.candidates(self._single))
        return bool(self._single["logit"][0] != -np.inf)

    def refused(self) -> NDArray[np.bool_]:
        """Return which tokens must not come next, `(n_vocab,)`."""
        table = np.zeros(self._n_vocab, CANDIDATE)  # which takes far less time than the grammar, and is not kept
        table["id"], table["logit"] = np.arange(self._n_vocab, dtype=np.int32), 1.0
        ggml.L.llama_sampler_apply(self._handle, ggml.candidates(table))
        return np.asarray(table["logit"] == -np.inf)

    def accept(self, token: int) -> None:
        """Go on by `token`, which must fit."""
        ggml.L.llama_sampler_accept(self._handle, token)

    def close(self) -> None:
        """Free it. Idempotent."""
        if self._handle:
            ggml.L.llama_sampler_free(self._handle)
            self._handle = None


def grammar_text(config: SamplingConfig) -> tuple[str, str]:
    """Return what errors call the grammar of `config`, and its text; both empty where it has none."""
    if config.json_schema_text:
        return JSON_SCHEMA, config.json_schema_text
    return ("grammar", config.grammar) if config.grammar else ("", "")


def _open(vocab: Any, text: str, name: str) -> Any:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}: not text that UTF-8 can hold, at character {error.start}") from None
    if b"\0" in data:
        raise ConfigError(f"{name}: must not hold a zero character, found one at byte {data.index(0)}")
    sampler, report = _with_stderr(lambda: ggml.L.llama_sampler_init_grammar(vocab, data, b"root"))
    if not sampler:
        raise ConfigError(f"{name}: llama.cpp cannot use it: {_grammar_reason(report)}")
    return sampler


def _with_stderr(action: Callable[[], Any]) -> tuple[Any, str]:
    """Return what `action` returns and what the process wrote to file descriptor 2 meanwhile.

    llama.cpp has no other word on what is wrong with a grammar, and repeats all of it there. What other threads wrote
    meanwhile is lost only if the action fails (returns something false); it takes well under a millisecond.
    """
    with _stderr_lock, contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile())
            original = os.dup(2)
        except OSError:  # no standard error to divert, or nowhere to divert it to
            return action(), ""
        os.dup2(file.fileno(), 2)
        try:
            result = action()
        finally:
            os.dup2(original, 2)
            os.close(original)
        file.seek(0)
        report = file.read()
        if result and report:
            os.write(2, report)
        return result, report.decode("utf-8", "replace")


def _grammar_reason(report: str) -> str:
    """Return llama.cpp's complaint about a grammar, without the grammar that it repeats, in one line."""
    line = next((line for line in report.splitlines() if line.strip()), "")
    reason = line.rpartition("error parsing grammar: ")[2].strip()[:200]
    if reason.endswith(" at"):  # what follows is the rest of the grammar: here none
        return f"{reason} the end"
    return reason or "it must have a rule `root ::= ...`, name only rules it defines, and not begin a rule with itself"
