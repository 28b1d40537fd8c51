"""Texts to vectors: passes that several texts share, and lengths of 1."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_run.base.errors import NotSupported
from edge_run.base.options import is_list
from edge_run.base.protocols import Text
from edge_run.runtime.embedding.results import Embeddings, EmbeddingShape, TextVectors, Vectors
from edge_run.runtime.embedding.texts import each_text, most_tokens
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama.context_shape import UNIFIED


def embedding_shape(engine: Engine) -> EmbeddingShape | None:
    """Return what the vectors of an open model are like; None where it generates text."""
    embedder = engine.embedder
    return EmbeddingShape(embedder.pooling, embedder.width, most_tokens(engine)) if embedder else None


def embed(
    path: Path,
    engine: Engine,
    texts: Text | Iterable[Text],
    normalize: bool,
    truncate: bool,
    on_text: Callable[[TextVectors], object] | None,
) -> Embeddings:
    """Return the vectors of `texts`; see `Model.embed`."""
    embedder = engine.embedder
    if embedder is None:
        raise NotSupported(f"{path}: was opened to generate text; open it for vectors with embeddings=True")
    engine.interrupt.reset()
    found_texts = each_text(engine, texts, truncate=truncate)
    given: Iterator[tuple[Sequence[int], bool]] = ((array("i", tokens), is_cut) for tokens, is_cut in found_texts)
    if is_list(texts):
        given = iter(list(given))  # all, before any is computed
    lengths, cuts = array("q"), bytearray()  # a few bytes for each of any number

    def noted() -> Iterator[Sequence[int]]:
        for tokens, is_cut in given:
            engine.interrupt.check()  # a text may have been waited for
            lengths.append(len(tokens))
            cuts.append(is_cut)
            yield tokens

    began_s, reads = time.monotonic(), engine.read_totals
    is_normalized = normalize and embedder.pooling != "rank"
    kept, number, n_passes = list[Vectors](), 0, 0
    for together in shared(noted(), engine.shape.sequences, engine.shape.micro_batch_tokens):
        n_passes += 1
        vectors = embedder.embed(together)
        vectors = normalized(vectors) if is_normalized else vectors
        for of_text in _of_each(together, vectors, embedder.pooling):
            if on_text is None:
                kept.append(of_text)
            else:
                on_text(TextVectors(number, of_text, lengths[number], bool(cuts[number])))
            number += 1
    numerics = engine.numerics
    if n_passes < len(lengths):
        numerics = replace(numerics, batching=UNIFIED)
    return Embeddings(
        vectors=np.concatenate(kept) if kept else np.empty((0, embedder.width), np.float32),
        tokens=tuple(lengths),
        truncated=tuple(number for number, is_cut in enumerate(cuts) if is_cut),
        pooling=embedder.pooling,
        is_normalized=is_normalized,
        passes=n_passes,
        wall_s=time.monotonic() - began_s,
        bytes_read=engine.read_totals.since(reads).bytes_read,
        memory=engine.memory_use,
        numerics=numerics,
        plan=engine.plan,
        backend=engine.backend,
    )


def _of_each(texts: Sequence[Sequence[int]], vectors: Vectors, pooling: str) -> list[Vectors]:
    """Return the rows of each text."""
    if pooling != "none":
        return [vectors[number : number + 1] for number in range(len(texts))]
    return np.split(vectors, np.cumsum([len(text) for text in texts])[:-1])


def shared(texts: Iterable[Sequence[int]], sequences: int, pass_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Yield the texts that are computed together, in their order: so many at most, in passes of so many tokens."""
    together = list[Sequence[int]]()
    for text in texts:
        if together and sum(map(len, together)) + len(text) > pass_tokens:
            yield together
            together = []
        together.append(text)
        if len(together) == sequences:  # before the next one is waited for
            yield together
            together = []
    if together:
        yield together


def normalized(vectors: Vectors) -> Vectors:
    """Return `vectors` with length 1, to the bit as llama.cpp's server has them; a vector of zeros stays as it is."""
    squares = np.cumsum(np.square(vectors).astype(np.float64), axis=1)[:, -1]
    scales = np.zeros(len(vectors))
    np.divide(1.0, np.sqrt(squares), out=scales, where=squares > 0)
    return vectors * scales.astype(np.float32)[:, None]
