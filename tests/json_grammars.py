"""What a grammar of a JSON schema takes, by llama.cpp's own grammar on the vocabulary of a small model."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.generation.sampling import OpenGrammar
from edge_run.runtime.grammars.grammar import LocalGrammar, grammar_text
from edge_run.runtime.grammars.schema_grammar import JSON_SCHEMA, schema_grammar
from edge_run.runtime.llama import _ggml as ggml
from kit_models import KIT

Takes = Callable[[Any, str], bool]


def opener(vocab: Any, n_vocab: int) -> OpenGrammar:
    """Return what opens the grammar of a configuration in this process."""

    def open_grammar(config: SamplingConfig) -> LocalGrammar | None:
        name, text = grammar_text(config)
        text = schema_grammar(text) if name == JSON_SCHEMA else text
        return LocalGrammar(vocab, n_vocab, text, name) if name else None

    return open_grammar


@contextlib.contextmanager
def with_vocabulary() -> Iterator[Takes]:
    """Return whether a grammar of a JSON schema takes a text as a whole answer."""
    ggml.L.llama_backend_init()
    parameters = ggml.L.llama_model_default_params()
    parameters.vocab_only = True
    model = ggml.L.llama_model_load_from_file(os.fsencode(KIT), parameters)
    vocab = ggml.L.llama_model_get_vocab(model)
    n_vocab = ggml.L.llama_vocab_n_tokens(vocab)

    def takes(schema: Any, text: str) -> bool:
        grammar = LocalGrammar(vocab, n_vocab, schema_grammar(json.dumps(schema)), JSON_SCHEMA)
        try:
            for token in ggml.tokenize(vocab, text, False, False):
                if not grammar.fits(token):
                    return False
                grammar.accept(token)
            return grammar.fits(ggml.L.llama_vocab_eos(vocab))
        finally:
            grammar.close()

    yield takes
    ggml.L.llama_model_free(model)


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
