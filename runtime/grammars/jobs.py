"""Runs grammars: the jobs of a `Cell`, as a grammar is a stranger's program. `room.py` is the other side.

The model file's vocabulary is loaded once; grammars that are open have numbers.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

import numpy as np

from edge_run.base.errors import BudgetError, KernelError
from edge_run.base.units import GIB, MIB
from edge_run.runtime.grammars.grammar import LocalGrammar
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.processes.cell_child import allow_memory, held_bytes
from edge_run.tiers._libc import trim_heap

VOCABULARY_BYTES = 2 * GIB  # as for every opening of a file: 150,000 tokens take 80 MB
GRAMMAR_BYTES, ALL_GRAMMARS_BYTES = 32 * MIB, 64 * MIB  # of one, and of all that are open; and besides:
_NO_ROOM = "the grammars that are open leave no room for another one; try again when one of them has ended"
GRAMMAR_BYTES_OF_A_TOKEN = 2048  # inside a string, where all tokens are candidates, llama.cpp takes 550 to 700 for each

_PLAIN = "root ::= [^\\x00]*"
_PLAIN_TOKENS, _PLAIN_STEPS = 4096, 5  # that are measured: all tokens of a large vocabulary would take a second

_models: dict[str, tuple[object, float]] = {}  # and how long a step of a plain grammar takes, in seconds
_open: dict[int, LocalGrammar] = {}
_before: list[int] = []  # what the process held before the first of those that are open, in bytes


def load_vocabulary(path: str) -> bytes:
    """Load the vocabulary of the model file at `path`, if another was. Raises KernelError.

    Returns how many seconds a plain grammar takes here to say which tokens may come next, as text.
    """
    if path in _models:
        return str(_models[path][1]).encode()
    allow_memory(VOCABULARY_BYTES)
    L.llama_backend_init()
    parameters = L.llama_model_default_params()
    parameters.vocab_only, parameters.n_gpu_layers = True, 0
    with ggml.log.listening(lambda line: None):
        model = L.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise KernelError(f"{path}: llama.cpp cannot load its vocabulary again; it may have changed")
    for number in list(_open):
        close_grammar(number)
    for other, _ in _models.values():
        L.llama_model_free(other)
    _models.clear()
    plain_step_s = _measure_plain_step(L.llama_model_get_vocab(model))
    _models[path] = model, plain_step_s
    return str(plain_step_s).encode()


def _measure_plain_step(vocab: object) -> float:
    n_vocab = L.llama_vocab_n_tokens(vocab)
    n_tokens = min(n_vocab, _PLAIN_TOKENS)
    grammar = LocalGrammar(vocab, n_tokens, _PLAIN)
    best_s = math.inf
    for _ in range(_PLAIN_STEPS):
        began_s = time.monotonic()
        grammar.refused()
        best_s = min(best_s, time.monotonic() - began_s)
    grammar.close()
    return best_s * n_vocab / n_tokens


def open_grammar(number: int, n_vocab: int, name: str, text: str, is_again: bool = False) -> bytes:
    """Open a grammar under a number that is free; errors call it `name`.

    is_again: it had its place beside the others in a process that has ended. Raises ConfigError for one that cannot be,
    KernelError, and BudgetError where the others leave no room for the largest that may be.
    """
    ((model, _),) = _models.values()
    vocab = L.llama_model_get_vocab(model)
    if (found := L.llama_vocab_n_tokens(vocab)) != n_vocab:
        raise KernelError(f"grammar: the model file has {found} tokens by now, and had {n_vocab}; open it again")
    step_bytes = GRAMMAR_BYTES_OF_A_TOKEN * n_vocab
    if not _open:
        with contextlib.suppress(OSError, ValueError):
            _before[:] = [held_bytes()]
    elif _before and not is_again and not _has_room():
        raise BudgetError(f"{name}: {_NO_ROOM}")
    most_bytes = _before[0] + ALL_GRAMMARS_BYTES + step_bytes if _before else None
    allow_memory(GRAMMAR_BYTES + step_bytes, most_bytes)
    _open[number] = LocalGrammar(vocab, n_vocab, text, name)
    return b""


def _has_room() -> bool:
    most_bytes = _before[0] + ALL_GRAMMARS_BYTES - GRAMMAR_BYTES
    if held_bytes() > most_bytes:
        trim_heap()  # of what steps took
    return held_bytes() <= most_bytes


def fits(number: int, token: int) -> bytes:
    """Return whether `token` may come next, as a byte."""
    return bytes([_open[number].fits(token)])


def refused(number: int) -> bytes:
    """Return which tokens must not come next, as bits."""
    return np.packbits(_open[number].refused()).tobytes()


def accept(number: int, tokens: list[int]) -> bytes:
    """Go on by `tokens`, which must fit."""
    for token in tokens:
        _open[number].accept(token)
    return b""


def close_grammar(number: int) -> bytes:
    """Free a grammar, if it is open."""
    if number in _open:
        _open.pop(number).close()
    return b""
