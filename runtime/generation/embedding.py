"""Texts to vectors: tokens, passes that several texts share, and lengths of 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_run.base.embeddings import Embeddings, Vectors
from edge_run.base.errors import ConfigError, ContextFull, NotSupported
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.batch import UNIFIED
from edge_run.runtime.generation.meter import Interval, Meter
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.prompt_text import CLEARLY, refuse_what_is_too_long
from edge_run.runtime.planning.embedding_shape import can_be_cut

Text = str | Sequence[int]


def embed(
    path: Path,
    engine: Engine,
    meter: Meter,
    texts: Sequence[Text],
    *,
    normalize: bool = True,
    truncate: bool = False,
) -> Embeddings:
    """Return the vectors of `texts`; see `Model.embed`."""
    embedder = engine.embedder
    if embedder is None:
        raise NotSupported(f"{path}: was opened to generate text; open it for vectors with embeddings=True")
    if not texts:
        raise ConfigError("texts: there are none; give at least one")
    most = most_tokens(engine)
    rows, truncated = list[list[int]](), list[int]()
    for number, text in enumerate(texts):
        tokens = _tokens(engine, number, text, most, truncate=truncate)
        if len(tokens) > most:
            truncated.append(number)
            tokens = _cut(engine, tokens, most)
        rows.append(tokens)
    engine.interrupt.reset()
    meter.lap()
    is_normalized = normalize and embedder.pooling != "rank"
    found, passes = list[Vectors](), list(shared(rows, engine.shape.sequences, engine.shape.micro_batch_tokens))
    for together in passes:
        found.append(embedder.embed(together))
    vectors = np.concatenate(found)
    spent = meter.lap()
    meter.count(sum(map(len, rows)), 0, Interval())
    numerics = engine.numerics
    if len(passes) < len(rows):
        numerics = replace(numerics, batching=UNIFIED)
    return Embeddings(
        vectors=normalized(vectors) if is_normalized else vectors,
        tokens=tuple(map(len, rows)),
        truncated=tuple(truncated),
        pooling=embedder.pooling,
        is_normalized=is_normalized,
        passes=len(passes),
        wall_s=spent.wall_s,
        bytes_read=spent.reads.bytes_read,
        memory=engine.memory_use,
        numerics=numerics,
        plan=engine.plan,
        backend=engine.backend,
    )


def most_tokens(engine: Engine) -> int:
    """Return the longest text that has a vector: where it cannot be cut into passes, one pass."""
    context_tokens = engine.decoder.capabilities.context_tokens
    if can_be_cut(engine.gguf, engine.shape.pooling):
        return context_tokens
    return min(context_tokens, engine.config.context_tokens or context_tokens)


def shared(texts: Sequence[list[int]], sequences: int, pass_tokens: int) -> Iterator[list[list[int]]]:
    """Yield the texts that are computed together, in their order: so many at most, in passes of so many tokens."""
    together = list[list[int]]()
    for text in texts:
        if together and (len(together) == sequences or sum(map(len, together)) + len(text) > pass_tokens):
            yield together
            together = []
        together.append(text)
    if together:
        yield together


def normalized(vectors: Vectors) -> Vectors:
    """Return `vectors` with length 1, to the bit as llama.cpp's server has them; a vector of zeros stays as it is."""
    squares = np.cumsum(np.square(vectors).astype(np.float64), axis=1)[:, -1]
    scales = np.zeros(len(vectors))
    np.divide(1.0, np.sqrt(squares), out=scales, where=squares > 0)
    return vectors * scales.astype(np.float32)[:, None]


def _tokens(engine: Engine, number: int, text: Text, most: int, *, truncate: bool) -> list[int]:
    """Return the tokens of text `number`, which is too long only if it may be cut."""
    model, what = engine.model, f"text {number + 1}"
    if isinstance(text, str):
        if not truncate:
            refuse_what_is_too_long(model, text, most, CLEARLY)
        tokens = model.tokenize(text, add_special=True, parse_special=False)
    else:
        tokens = list(text)
        if outside := [token for token in tokens if not 0 <= token < model.vocabulary]:
            raise ConfigError(f"{what}: token {outside[0]} is outside the vocabulary of {model.vocabulary}")
    if not tokens:
        raise ConfigError(f"{what}: is empty; give at least one token")
    if len(tokens) > most and not truncate:
        raise ContextFull(
            f"{what}: has {len(tokens):,} tokens, and the longest that has a vector here has {most:,}; shorten it, "
            "have it cut (truncate), or give more context with -c",
            prompt_tokens=len(tokens),
            context_tokens=most,
        )
    return tokens


def _cut(engine: Engine, tokens: list[int], most: int) -> list[int]:
    """Return the first tokens of a text, and the end that the vocabulary adds to every text."""
    added = engine.model.tokenize("", add_special=True, parse_special=False)
    is_added = len(added) > L.llama_vocab_get_add_bos(engine.model.vocab) and tokens[-1] == added[-1]
    return [*tokens[: most - 1], tokens[-1]] if is_added else tokens[:most]
