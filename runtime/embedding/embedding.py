"""Texts to vectors: passes that several texts share, and lengths of 1."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_run.base.errors import NotSupported
from edge_run.base.protocols import Text
from edge_run.runtime.embedding.results import Embeddings, EmbeddingShape, TextVectors, Vectors
from edge_run.runtime.embedding.texts import most_tokens, text_tokens
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama.context_shape import UNIFIED


def embedding_shape(engine: Engine) -> EmbeddingShape | None:
    """Return what the vectors of an open model are like; None where it generates text."""
    embedder = engine.embedder
    return EmbeddingShape(embedder.pooling, embedder.width, most_tokens(engine)) if embedder else None


def embed(
    path: Path,
    engine: Engine,
    texts: Text | Sequence[Text],
    normalize: bool,
    truncate: bool,
    on_text: Callable[[TextVectors], object] | None,
) -> Embeddings:
    """Return the vectors of `texts`; see `Model.embed`."""
    embedder = engine.embedder
    if embedder is None:
        raise NotSupported(f"{path}: was opened to generate text; open it for vectors with embeddings=True")
    engine.interrupt.reset()
    given = text_tokens(engine, texts, truncate=truncate)
    began_s, reads = time.monotonic(), engine.read_totals
    is_normalized = normalize and embedder.pooling != "rank"
    found, passes = list[Vectors](), list(shared(given.tokens, engine.shape.sequences, engine.shape.micro_batch_tokens))
    for together in passes:
        vectors = embedder.embed(together)
        vectors = normalized(vectors) if is_normalized else vectors
        for text, of_text in zip(together, _of_each(together, vectors, embedder.pooling), strict=True):
            if on_text is not None:
                on_text(TextVectors(len(found), of_text, len(text), len(found) in given.truncated))
            found.append(of_text)
    numerics = engine.numerics
    if len(passes) < len(given.tokens):
        numerics = replace(numerics, batching=UNIFIED)
    return Embeddings(
        vectors=np.concatenate(found),
        tokens=tuple(map(len, given.tokens)),
        truncated=given.truncated,
        pooling=embedder.pooling,
        is_normalized=is_normalized,
        passes=len(passes),
        wall_s=time.monotonic() - began_s,
        bytes_read=engine.read_totals.since(reads).bytes_read,
        memory=engine.memory_use,
        numerics=numerics,
        plan=engine.plan,
        backend=engine.backend,
    )


def _of_each(texts: Sequence[list[int]], vectors: Vectors, pooling: str) -> list[Vectors]:
    """Return the rows of each text."""
    if pooling != "none":
        return [vectors[number : number + 1] for number in range(len(texts))]
    return np.split(vectors, np.cumsum([len(text) for text in texts])[:-1])


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
