"""Vectors of texts: llama.cpp's to the bit, resident and streamed; what is refused, and in which words."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from gguf import GGUFReader

from edge_run import AsyncModel, Model, plan, to_json
from edge_run.base.errors import Cancelled, ConfigError, ContextFull, KernelError, NotSupported
from edge_run.cli.shared import figures
from edge_run.runtime.decoding.embedder import Embedder
from edge_run.runtime.embedding.embedding import normalized, shared
from edge_run.runtime.embedding.results import EmbeddingShape, TextVectors
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.request import Turn
from edge_run.runtime.llama.model import LlamaModel
from edge_run.tiers.source import SourceFile
from in_child import in_child
from llama_tensors import silence_llama_logs
from small_engines import open_engine, streaming_engine
from stock_embeddings import stock_vectors
from tiny_models import N_VOCAB, make_model

WIDTH = 64
TEXTS = [np.random.default_rng(n).integers(1, N_VOCAB, n).tolist() for n in (1, 40, 7, WIDTH, 40)]
OPTIONS = {"context_tokens": WIDTH, "micro_batch_tokens": WIDTH}
LONGEST = {"context_tokens": WIDTH, "threads": 1, "check_file": False}


@pytest.fixture(autouse=True, scope="module")
def quiet() -> None:
    silence_llama_logs()


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return make_model("bert", tmp_path)


@pytest.fixture
def opened(bert: Path) -> Iterator[Model]:
    with Model(bert, **LONGEST) as model:
        yield model


def vectors(engine: Engine) -> np.ndarray:
    """The vectors of TEXTS, each alone."""
    assert engine.embedder is not None
    return np.concatenate([engine.embedder.embed([text]) for text in TEXTS])


@pytest.mark.parametrize(
    "name", ["bert", "bert-rank", "gemma-embedding", "jina-bert-v2", "modern-bert", "nomic-bert", "qwen3-embedding"]
)
@in_child
def test_vectors_are_those_of_llama_cpp(name: str, folder: Path) -> None:
    """Read as a whole and streamed; nothing of a text is left for the next one."""
    path = make_model(name, folder, scale=2)
    wanted = stock_vectors(path, TEXTS, WIDTH)
    with open_engine(path, memory="1GiB", **OPTIONS) as engine:
        assert engine.plan.mode == "resident"
        assert np.array_equal(vectors(engine), wanted)
    with streaming_engine(path, **OPTIONS) as engine:
        assert 2 * engine.plan.streamed_bytes_per_pass > engine.plan.model_bytes
        assert np.array_equal(vectors(engine), wanted)
        assert engine.memory_use.peak_bytes <= engine.budget_bytes
    assert np.ptp(wanted) > 0.1


@pytest.mark.parametrize(("pooling", "number"), [("none", 0), ("mean", 1), ("last", 3)])
def test_any_decoder_has_vectors(pooling: str, number: int, tmp_path: Path) -> None:
    """Of a text that is longer than a pass too, where the last token alone is looked at."""
    path, width = make_model("qwen2", tmp_path), 16 if pooling == "last" else WIDTH
    wanted = stock_vectors(path, TEXTS, WIDTH, pooling=number, pass_tokens=width)
    options = {"context_tokens": WIDTH, "micro_batch_tokens": width, "pooling": pooling, "outputs_per_pass": 1}
    with streaming_engine(path, **options) as engine:
        assert np.array_equal(vectors(engine), wanted)
    assert engine.numerics.pooling == pooling


@pytest.mark.parametrize("name", ["nomic-bert", "qwen3-embedding"])
def test_texts_that_share_a_pass(name: str, tmp_path: Path) -> None:
    """They get the bits that llama.cpp gives them together, and with `exact` those of each alone."""
    path = make_model(name, tmp_path)
    options = {**LONGEST, "micro_batch_tokens": WIDTH, "threads": 1}
    texts = [TEXTS[2], TEXTS[0], TEXTS[2]]
    with Model(path, **options, sequences=3) as model:
        together = model.embed(texts, normalize=False)
    assert np.array_equal(together.vectors, stock_vectors(path, texts, WIDTH, sequences=3))
    assert (together.passes, together.numerics.batching) == (1, "unified")
    with Model(path, **options, sequences=3, exact=True) as model:
        alone = model.embed(texts, normalize=False)
    assert np.array_equal(alone.vectors, stock_vectors(path, texts, WIDTH, flash_attention=0))
    assert (alone.passes, alone.numerics.batching) == (3, "")
    assert np.allclose(together.vectors, alone.vectors, atol=0.1)


def test_texts_share_passes_in_their_order() -> None:
    lengths = [3, 4, 2, 9, 1, 1, 1, 1]
    texts = [[number] * length for number, length in enumerate(lengths)]
    passes = [[text[0] for text in together] for together in shared(texts, 3, 9)]
    assert passes == [[0, 1, 2], [3], [4, 5, 6], [7]]


def test_texts_that_are_all_there_wait_for_no_other() -> None:
    def texts() -> Iterator[list[int]]:
        yield from ([1], [2])
        raise AssertionError("was asked for a third one")

    assert next(shared(texts(), 2, 9)) == [[1], [2]]


@pytest.mark.parametrize("kind", [list, iter])
def test_texts_are_tokenized_once_and_asked_for_as_there_is_room(
    kind: Callable[[list[str]], Any], opened: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a list, before any is computed; else one after the other, so that any number of them has room."""
    order, tokenize = list[str](), LlamaModel.tokenize

    def noted(model: LlamaModel, text: str, **how: bool) -> list[int]:
        order.append(text)
        return tokenize(model, text, **how)

    texts = ["a fox", "a wolf", "a bear"]
    wanted = opened.embed(texts)
    monkeypatch.setattr(LlamaModel, "tokenize", noted)
    vectors = list[np.ndarray]()

    def take(text: TextVectors) -> None:
        order.append(f"{text.number}")
        vectors.append(text.vectors)

    found = opened.embed(kind(texts), on_text=take)
    assert order == ([*texts, "0", "1", "2"] if kind is list else ["a fox", "0", "a wolf", "1", "a bear", "2"])
    assert np.array_equal(np.concatenate(vectors), wanted.vectors)
    assert (found.tokens, found.passes) == (wanted.tokens, wanted.passes)


@pytest.mark.parametrize("kind", [list, iter])
def test_a_text_that_is_too_long_is_refused_when_it_is_looked_at(kind: Callable[[Any], Any], opened: Model) -> None:
    given = list[int]()
    with pytest.raises(ContextFull, match="text 3: "):
        opened.embed(kind([TEXTS[0], TEXTS[1], [*TEXTS[3], 5]]), on_text=lambda text: given.append(text.number))
    assert given == ([] if kind is list else [0, 1])


def test_lengths_of_one() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 0.0], [-1e-20, 0.0]], np.float32)
    assert np.array_equal(normalized(rows)[:2], np.array([[0.6, 0.8], [0, 0]], np.float32))
    assert not np.isnan(normalized(rows)).any()


@pytest.fixture
def reading_late(bert: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """A model whose weights are read once vectors are computed; usually they may be there by then.

    The page cache may hold all of it, so that nothing would be read.
    """
    may_read, read = threading.Event(), SourceFile.read_pieces
    monkeypatch.setattr(SourceFile, "read_pieces", lambda *given: (may_read.wait(60), read(*given))[1])
    with Model(bert, page_cache="off", **LONGEST) as model:
        embed = Embedder.embed
        monkeypatch.setattr(Embedder, "embed", lambda self, texts: (may_read.set(), embed(self, texts))[1])
        yield model
        may_read.set()


def test_a_model_gives_vectors_with_what_they_cost(reading_late: Model) -> None:
    opened = reading_late
    found = opened.embed(["one text", TEXTS[1]])
    assert found.vectors.shape == (2, 256)
    assert np.allclose(np.linalg.norm(found.vectors, axis=1), 1)
    assert found.tokens == (len(opened.tokenize("one text")), 40)
    assert (found.pooling, found.is_normalized, found.passes, found.truncated) == ("cls", True, 2, ())
    assert found.bytes_read > 0
    assert np.array_equal(found.of(1), found.vectors[1:])
    assert np.array_equal(opened.embed(TEXTS[1]).vectors, found.of(1))
    assert opened.stats.prompt_tokens == sum(found.tokens) + 40
    assert opened.embedding is not None
    document = json.loads(to_json(found))
    assert np.array_equal(np.array(document["vectors"], np.float32), found.vectors)
    assert figures.describe_embedding("a model", found.plan, opened.embedding).count("pooling cls") == 1


def test_vectors_of_damaged_weights_are_refused(tmp_path: Path) -> None:
    path, damaged = make_model("qwen3-embedding", tmp_path), tmp_path / "damaged.gguf"
    norm = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "output_norm.weight")
    content = bytearray(path.read_bytes())
    content[norm.data_offset : norm.data_offset + 4] = b"\xff" * 4  # NaN
    damaged.write_bytes(content)
    with Model(damaged, **LONGEST) as model, pytest.raises(KernelError, match=r"not finite.*copy or download"):
        model.embed("one text")


def test_texts_that_are_too_long(opened: Model) -> None:
    assert opened.embedding == EmbeddingShape("cls", 256, WIDTH)
    long = [*TEXTS[3], 5]
    lacking = r"text 2: has 65 tokens, .* has 64; shorten it, have it cut \(truncate=True\), or raise context_tokens="
    with pytest.raises(ContextFull, match=lacking) as refused:
        opened.embed([TEXTS[0], long])
    assert (refused.value.prompt_tokens, refused.value.context_tokens) == (65, WIDTH)
    cut = opened.embed([TEXTS[0], long], truncate=True)
    assert (cut.truncated, cut.tokens) == ((1,), (1, WIDTH))
    assert np.array_equal(cut.of(1), opened.embed(TEXTS[3]).vectors)


def test_of_a_text_that_is_far_too_long_the_beginning_is_tokenized(
    opened: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, tokenize = list[int](), LlamaModel.tokenize

    def noted(model: LlamaModel, text: str, **how: bool) -> list[int]:
        asked.append(len(text))
        return tokenize(model, text, **how)

    monkeypatch.setattr(LlamaModel, "tokenize", noted)
    text = "a fox ran. " * 100_000
    cut = opened.text_tokens(text, truncate=True)
    assert max(asked) < len(text) / 10
    assert (cut.truncated, cut.tokens) == ((0,), opened.text_tokens(text[:10_000], truncate=True).tokens)
    monkeypatch.setattr(LlamaModel, "tokenize", lambda model, text, **how: [1] * (len(text) // 10_000))
    rare = opened.text_tokens(text, truncate=True)
    assert (rare.truncated, len(rare.tokens[0])) == ((0,), WIDTH), "of few tokens, enough is"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        *[([], "there are none"), ([[1], []], "text 2: is empty"), ([[N_VOCAB]], "text 1: token 384 is outside")],
        *[(iter(()), "there are none"), (iter([1, 2]), "text 1: 1 is neither"), ({"a": 1}, "must be text")],
        *[
            (b"Once", "must be text"),
            (5, "must be text"),
            ([[1], b"x"], "text 2: b'x' is neither"),
            ([["x"]], "no token"),
        ],
    ],
)
def test_texts_that_cannot_be(opened: Model, texts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened.embed(texts)


def test_an_encoder_makes_no_text(opened: Model, bert: Path) -> None:
    with pytest.raises(NotSupported, match="makes embeddings and no text; use `edge-run embed`"):
        opened.generate("x")
    with pytest.raises(NotSupported, match="makes embeddings and no text; use `edge-run embed`"):
        Model(bert, embeddings=False)


def test_a_model_is_for_text_or_for_vectors(tmp_path: Path) -> None:
    path = make_model("qwen3-embedding", tmp_path)
    with Model(path, **LONGEST) as model, pytest.raises(NotSupported, match="opened for embeddings"):
        model.generate("x")
    with Model(path, **LONGEST, embeddings=False) as model:
        assert model.generate([1, 2], max_tokens=2).result().completion_tokens == 2
        with pytest.raises(NotSupported, match="open it for vectors with embeddings=True"):
            model.embed("x")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"gpu_memory": "1GiB"}, NotSupported, "processor alone"),
        ({"context_tokens": 2048}, ConfigError, "learned positions for 1,024 tokens; give context_tokens=1024"),
        ({"pooling": "most"}, ConfigError, "pooling 'most': must be one of"),
        ({"pooling": "rank"}, NotSupported, "pooling rank: this model has nothing that gives scores"),
    ],
)
def test_options_that_do_not_go_with_vectors(
    bert: Path, options: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        plan(bert, **options)


def test_tasks_take_turns(bert: Path) -> None:
    async def run() -> list[np.ndarray]:
        found: dict[int, np.ndarray] = {}

        async def one(number: int) -> None:
            found[number] = (await model.embed(TEXTS[number])).vectors

        async with AsyncModel(bert, **LONGEST) as model, anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(one, number, name="embed")
        return [found[number] for number in range(3)]

    with Model(bert, **LONGEST) as model:
        assert np.array_equal(np.concatenate(anyio.run(run)), model.embed(TEXTS[:3]).vectors)


def test_keys_that_wait_take_turns(bert: Path) -> None:
    ended = list[str]()

    async def one(model: AsyncModel, name: str, priority: int = 0) -> None:
        await model.embed(TEXTS[0], key=name[0], priority=priority)
        ended.append(name)

    async def run() -> None:
        async with AsyncModel(bert, **LONGEST) as model, anyio.create_task_group() as group, model._own_turn(Turn()):
            for name in ("a1", "a2", "a3", "b1"):
                group.start_soon(one, model, name, name=name)
                await anyio.wait_all_tasks_blocked()
            group.start_soon(one, model, "c1", 1, name="c1")
            await anyio.wait_all_tasks_blocked()

    anyio.run(run)
    assert ended == ["c1", "a1", "b1", "a2", "a3"]


@pytest.mark.parametrize("n_texts", [1, 100_000], ids=["waiting", "computing"])
def test_vectors_that_are_not_there_in_time_are_not_waited_for(bert: Path, n_texts: int) -> None:
    async def run() -> None:
        async with AsyncModel(bert, **LONGEST) as model:
            async with model._turns.held() if n_texts == 1 else nullcontext():
                with pytest.raises(Cancelled, match=r"the vectors were not there within 0\.2 s"):
                    await model.embed([TEXTS[0]] * n_texts, deadline_s=0.2)
            assert len((await model.embed(TEXTS[0], deadline_s=1000)).tokens) == 1

    anyio.run(run)


def test_what_waits_for_texts_is_ended_when_one_comes(bert: Path) -> None:
    def texts() -> Iterator[list[int]]:
        model.cancel()
        yield TEXTS[0]
        raise AssertionError("more texts are asked for")

    with Model(bert, **{**LONGEST, "sequences": 3}) as model:
        with pytest.raises(Cancelled):
            model.embed(texts())
        with pytest.raises(ConfigError, match=r"must be text or tokens, or a list of those"):
            model.embed(np.array(5))
        assert len(model.embed(TEXTS[0]).tokens) == 1


@pytest.mark.parametrize("texts", [iter(TEXTS), np.array(5), b"text", {"text": 1}])
def test_tasks_give_texts_in_a_list(bert: Path, texts: Any) -> None:
    async def run() -> None:
        async with AsyncModel(bert, **LONGEST) as model:
            with pytest.raises(ConfigError, match=r"must be text or tokens, or a list of those"):
                await model.embed(texts)

    anyio.run(run)
