"""Speculation with real llama.cpp: the same tokens, inside the same budget, and what it cannot do."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eager import Eager
from edge_run import AsyncModel, BudgetError, ConfigError, Model, ModelFileError, NotSupported
from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.generation.stream import Stream
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.speculation import overlap
from edge_run.runtime.speculation.draft_model import DraftModel
from edge_run.runtime.speculation.overlap import Overlap, following
from in_child import in_child
from kit_models import KIT, streamed
from tiny_models import make_model

PROMPT = "Once upon a time, in a small town by the sea, there was"
RESIDENT: dict[str, Any] = {"threads": 1, "context_tokens": 256, "micro_batch_tokens": 32, "draft_tokens": 15}
NOISE = 0.3  # between widths, on these models
LONG = 200  # tokens: more than are computed before somebody that waits for the processor acts


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every conversation speculate always."""
    monkeypatch.setattr(speculation_setup, "WidthControl", Eager)


@pytest.fixture(scope="module")
def drafter(folder: Path) -> Path:
    """A tiny model, and as its own drafter four bits of it: they agree often, and not always."""
    return make_model("llama", folder, quantisation="Q4_0")


def opened(path: Path, **options: Any) -> Engine:
    return Engine.open(path, ModelConfig(**{**RESIDENT, **options}))


def continued(session: Session, prompt: list[int], n_tokens: int) -> tuple[list[int], np.ndarray]:
    """Return the likeliest continuation, and the logits by which each token was chosen."""
    logits, _ = session.feed(prompt)
    tokens, rows = [], []
    for _ in range(n_tokens):
        rows.append(np.array(logits))
        tokens.append(int(logits.argmax()))
        logits = session.step(tokens[-1])
    return tokens, np.array(rows)


def both(path: Path, n_tokens: int, **options: Any) -> tuple[Any, Any, Any]:
    """Return (tokens, rows) without and with speculation, and what the latter did."""
    prompt = [3 + 7 * i % 300 for i in range(40)]
    plain = opened(path, **{**options, "speculate": "off"})
    wanted = continued(open_session(plain), prompt, n_tokens)
    plain.close()
    engine = opened(path, **options)
    session = open_session(engine)
    found = continued(session, prompt, n_tokens)
    engine.close()
    return wanted, found, session.speculation()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("exact", [True, False])
def test_guesses_made_beside_a_pass_change_nothing_and_are_used(
    folder: Path, drafter: Path, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model computes on another thread while the target does, and is back on its own threads after it."""
    used = []

    def counted(*arguments: Any) -> Any:
        used.append(found := following(*arguments))
        return found

    def to_the_end(model: DraftModel, *arguments: Any) -> Any:
        return aside(model, *arguments[:-1], threading.Event())  # also when the pass is over sooner, as it is here

    aside = DraftModel.draft_aside
    monkeypatch.setattr(DraftModel, "draft_aside", to_the_end)
    monkeypatch.setattr(Overlap, "is_on", True)
    monkeypatch.setattr(overlap, "following", counted)
    wanted, found, did = both(make_model("llama", folder), 120, exact=exact, draft=drafter, speculate="draft")
    assert found[0] == wanted[0] if exact else np.abs(found[1][0] - wanted[1][0]).max() <= NOISE
    assert np.array_equal(found[1], wanted[1]) or not exact
    assert did.accepted > 10
    assert any(used)
    assert not [thread for thread in threading.enumerate() if thread.name == "edge-run-overlap"]


@pytest.mark.parametrize("quantisation", ["Q4_K_M", "Q4_0"])  # whose output matrix is one of K-quants
def test_exact_logits_do_not_depend_on_the_width_of_a_pass(folder: Path, quantisation: str) -> None:
    """From eight tokens on, llama.cpp has other kernels for some types."""
    engine = opened(make_model("llama", folder, quantisation=quantisation), exact=True, outputs_per_pass=16)
    tokens = [3 + 7 * i % 300 for i in range(40)]
    engine.decoder.decode([BatchToken(token, i) for i, token in enumerate(tokens[:24])])
    found = []
    for width in (2, 3, 7, 8, 9, 16):
        batch = [BatchToken(tokens[24 + i], 24 + i, 0, wants_logits=True) for i in range(width)]
        found.append(engine.decoder.decode(batch)[:2].copy())
        engine.decoder.rewind(0, 24)
    engine.close()
    assert all(np.array_equal(rows, found[0]) for rows in found)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("speculate", ["ngram", "draft", "auto"])
def test_exact_logits_are_the_same_bit_for_bit(folder: Path, drafter: Path, speculate: str, threads: int) -> None:
    draft = None if speculate == "ngram" else drafter
    options = {"exact": True, "draft": draft, "speculate": speculate, "threads": threads}
    wanted, found, did = both(make_model("llama", folder), 100, **options)
    assert found[0] == wanted[0]
    assert np.array_equal(found[1], wanted[1])
    assert did.accepted > 10 or speculate == "ngram"  # a model of random weights hardly repeats itself
    assert did.drafted > 10
    assert did.passes + did.accepted == 100
    assert (did.noise, did.near_ties) == (0, 0)


@pytest.mark.usefixtures("eager")
def test_exact_logits_of_a_window_are_the_same_beyond_the_end_of_its_ring(folder: Path) -> None:
    """llama.cpp goes on from the first free cell: of guesses on both sides of the end it was one of the beginning."""
    path, begin, end = make_model("gemma3", folder), [3 + 7 * i % 300 for i in range(244)], [5, 6, 7] * 20
    options: dict[str, Any] = {"exact": True, "context_tokens": 512, "draft_tokens": 7}
    found: dict[str, list[np.ndarray]] = {}
    for speculate in ("off", "ngram"):
        with contextlib.closing(opened(path, **options, speculate=speculate)) as engine:
            assert engine.decoder.capabilities.ring_tokens == 256
            session = open_session(engine)
            rows = [session.feed(begin)[0].copy(), *(session.step(token).copy() for token in end)]
            assert session.speculation().drafted or speculate == "off"
            text = [*begin[:200], *end]
            found[speculate] = [*rows, session.feed(text)[0].copy()]
            session.forget()
            assert np.array_equal(session.feed(text)[0], found[speculate][-1]), "it was cut back across the end"
    assert all(map(np.array_equal, found["off"], found["ngram"]))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["llama", "llama-moe"])
@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_logits_of_wider_passes_differ_by_noise_only(folder: Path, flash_attention: str, kind: str) -> None:
    draft = make_model(kind, folder, quantisation="Q8_0")
    wanted, found, did = both(make_model(kind, folder), 100, draft=draft, flash_attention=flash_attention)
    same = next((i for i, (a, b) in enumerate(zip(wanted[0], found[0], strict=True)) if a != b), 100)
    assert np.abs(wanted[1][:same] - found[1][:same]).max() < NOISE
    if same < 100:
        second, best = np.partition(wanted[1][same], -2)[-2:]
        assert best - second < NOISE
    assert did.accepted > 10
    assert max(did.widths) > 4


@pytest.mark.parametrize("exact", [False, True])
def test_streamed_and_resident_give_the_same_bits(grown: Path, exact: bool) -> None:
    _streamed_and_resident(grown=grown, exact=exact)


@in_child  # whose memory is that of these models alone
def _streamed_and_resident(grown: Path, exact: bool) -> None:
    speculation_setup.WidthControl = Eager  # type: ignore[misc]
    options = {"draft": KIT, "draft_tokens": 8, "exact": exact, "threads": 1, "context_tokens": 256}
    rows, modes = [], []
    for place in (grown, KIT):
        memory = streamed()["memory"] if place == grown else None
        with contextlib.closing(opened(place, **options, micro_batch_tokens=16, memory=memory)) as engine:
            modes.append(engine.plan.mode)
            prompt = [5 + 11 * i % 900 for i in range(30)]
            session = open_session(engine)
            rows.append(continued(session, prompt, 24))
            assert engine.memory_use.peak_bytes <= engine.budget_bytes
        assert session.speculation().accepted > 0
    assert modes == ["streamed", "resident"]
    assert rows[0][0] == rows[1][0]
    assert np.array_equal(rows[0][1], rows[1][1])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.9}, {"temperature": 1.0, "repeat_penalty": 1.3}, {"grammar": 'root ::= ("yes " | "no ")+'}],
    ids=["temperature", "penalty", "grammar"],
)
def test_a_seed_gives_the_tokens_that_it_gives_without_speculation(kit: Path, options: dict[str, Any]) -> None:
    answers = []
    for speculation in ({"speculate": "off"}, {"speculate": "ngram"}, {"draft": kit}):
        with Model(kit, exact=True, **RESIDENT, **speculation) as model:
            for seed in (1, 2):
                answer = model.generate(PROMPT, max_tokens=24, seed=seed, **options).result()
                answers.append(answer.token_ids)
                assert answer.speculation.mode == {"off": "off", "ngram": "ngram"}.get(
                    str(speculation.get("speculate")), "draft+ngram"
                )
    assert answers[0:2] == answers[2:4] == answers[4:6]


@pytest.mark.usefixtures("eager")
def test_stop_texts_lengths_and_the_end_of_the_context_end_an_answer_as_ever(kit: Path) -> None:
    found, long = [], " ".join([PROMPT] * 12)
    for draft in (None, kit):
        with Model(kit, exact=True, draft=draft, **RESIDENT) as model:
            whole = model.generate(PROMPT, max_tokens=30, temperature=0).result()
            stop = whole.text[20:26]
            answers = [whole, model.generate(PROMPT, temperature=0, stop=[stop]).result()]
            answers += [model.generate(PROMPT, temperature=0, max_tokens=n).result() for n in (0, 1, 2)]
            answers += [model.generate(long, temperature=0).result()]
            found.append([(a.text, a.token_ids, a.finish_reason, a.cached_tokens) for a in answers])
    assert found[0] == found[1]
    assert found[0][-1][2] == "context"
    assert len(found[0][-1][1]) > 40


@pytest.mark.usefixtures("eager")
def test_what_follows_the_last_token_of_an_answer_is_not_guessed(kit: Path) -> None:
    with Model(kit, draft=kit, **RESIDENT) as model:
        answers = [model.generate(PROMPT, max_tokens=n, temperature=0).result() for n in (2, 9)]
    assert [answer.completion_tokens for answer in answers] == [2, 9]
    assert [answer.speculation.drafted > 0 for answer in answers] == [False, True]


@pytest.mark.usefixtures("eager")
def test_a_conversation_goes_on_where_it_was_left(kit: Path) -> None:
    """An answer that was closed in the middle of a tree, a prompt that goes on, one that turns off."""
    found = []
    for draft in (None, kit):
        with Model(kit, exact=True, draft=draft, **RESIDENT) as model:
            stream = model.generate(PROMPT, max_tokens=30, temperature=0)
            said = "".join(next(stream).text for _ in range(7))
            stream.close()
            answers = [model.generate(PROMPT + said + " and", max_tokens=9, temperature=0).result()]
            answers += [model.generate(PROMPT[:30] + "x", max_tokens=9, temperature=0).result()]
            found.append([(a.token_ids, a.cached_tokens) for a in answers])
    assert found[0] == found[1]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_cancelling_and_interrupting_leave_a_conversation_that_is_right(grown: Path, is_interrupted: bool) -> None:
    options = {**streamed(), "draft": KIT, "draft_tokens": 7, "exact": True}
    with Model(grown, **options) as model:
        wanted = model.generate(PROMPT, max_tokens=60, temperature=0).result().token_ids
        for n_before in (0, 1, 5, 9):
            is_time, is_over = threading.Event(), threading.Event()

            def act(is_time: threading.Event = is_time, is_over: threading.Event = is_over) -> None:
                is_time.wait()
                while model.progress is None and not is_over.is_set():  # between passes
                    time.sleep(0.0005)
                if is_interrupted:
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    model.cancel()

            thread = threading.Thread(target=act)
            thread.start()
            found: list[int] = []
            stream = model.generate(PROMPT, max_tokens=LONG, temperature=0)
            with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
                _hear(stream, n_before, is_time, found)
                is_over.set()
            thread.join()
            assert len(found) < LONG
            assert found[: len(wanted)] == list(wanted[: len(found)])
            assert is_interrupted or stream.result().finish_reason == "cancelled"
        again = model.generate(PROMPT, max_tokens=12, temperature=0).result()
        assert again.token_ids == wanted[:12], "what went wrong shows in the first"


def _hear(stream: Stream, n_before: int, is_time: threading.Event, found: list[int]) -> None:
    """Add the tokens of `stream` to `found`; after `n_before` pieces it is time."""
    for number in itertools.count():
        if number == n_before:
            is_time.set()
        piece = next(stream, None)
        if piece is None:
            return
        found.extend(piece.token_ids)


@pytest.mark.anyio
@pytest.mark.usefixtures("eager")
async def test_an_async_model_speculates(kit: Path) -> None:
    async with AsyncModel(kit, draft=kit, **RESIDENT) as model:
        pieces = [piece async for piece in model.generate(PROMPT, max_tokens=20, temperature=0)]
    generation = pieces[-1].generation
    assert generation is not None
    assert generation.speculation.accepted > 5


def test_plain_decoding_is_what_it_was(kit: Path) -> None:
    """Without a draft model nothing is asked for, and nothing of the context is changed."""
    with Model(kit, **RESIDENT) as model:
        answer = model.generate(PROMPT, max_tokens=5, temperature=0).result()
        assert type(model._session) is Session
    assert answer.speculation.mode == "off"
    assert answer.numerics.sequences == 1
    assert "draft" not in [item.what for item in answer.plan.items]


def test_the_plan_counts_the_draft_model(grown: Path) -> None:
    plans = {}
    for draft in (None, KIT):
        with Model(grown, **streamed(), draft=draft) as model:
            plans[draft] = model.plan
        assert model.plan.mode == "streamed"
    forecast = planner(grown, ModelConfig(**streamed(), draft=KIT)).plan()
    sizes = {item.what: item.size_bytes for item in plans[KIT].items}
    assert KIT.stat().st_size < sizes["draft"] < 10 * KIT.stat().st_size
    assert abs({item.what: item.size_bytes for item in forecast.items}["draft"] - sizes["draft"]) < 4 * 2**20
    assert sum(sizes.values()) <= plans[KIT].budget_bytes
    assert plans[KIT].minimum_bytes > plans[None].minimum_bytes + KIT.stat().st_size // 2


@pytest.mark.usefixtures("eager")
def test_what_cannot_branch_guesses_chains_and_what_cannot_be_cut_does_not_guess(folder: Path) -> None:
    for kind, mode, word in (("gemma3", "ngram", "chain"), ("mamba", "off", "recurrent"), ("llama", "ngram", "")):
        with Model(make_model(kind, folder), speculate="ngram", **RESIDENT) as model:
            answer = model.generate([3, 4, 5, 6] * 5, max_tokens=20, temperature=0).result()
            assert answer.speculation.mode == mode
            assert word in model.speculation.reason
            assert (answer.numerics.sequences > 1) == (kind == "llama")
        with Model(make_model(kind, folder), **RESIDENT) as model:
            wanted = model.generate([3, 4, 5, 6] * 5, max_tokens=20, temperature=0).result()
        assert answer.token_ids == wanted.token_ids


@pytest.mark.usefixtures("eager")
def test_a_draft_model_that_cannot_branch_guesses_chains(folder: Path) -> None:
    """Its window is passed several times."""
    target, draft = make_model("gemma3", folder), make_model("gemma3", folder, quantisation="Q8_0")
    answers = []
    for drafting in (None, draft):
        with Model(target, draft=drafting, speculate="auto", exact=True, **RESIDENT) as model:
            answers.append(model.generate([3, 4, 5], max_tokens=200, temperature=0).result())
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].speculation.accepted > 10


REFUSALS: list[tuple[str, Callable[[Path], dict[str, Any]], type[Exception], str]] = [
    ("another vocabulary", lambda folder: {"draft": make_model("llama", folder)}, NotSupported, "vocabulary"),
    ("no file", lambda folder: {"draft": folder / "none.gguf"}, ModelFileError, "none.gguf"),
    ("no model", lambda folder: {"draft": _text(folder / "text.gguf")}, ModelFileError, "text.gguf"),
    ("no room", lambda folder: {"draft": KIT, "memory": "60MiB"}, BudgetError, "draft model"),
    ("no drafter", lambda folder: {"speculate": "draft"}, ConfigError, "draft="),
    ("no such way", lambda folder: {"speculate": "maybe"}, ConfigError, "ngram"),
    ("no tokens", lambda folder: {"draft_tokens": 0}, ConfigError, "1 to"),
    ("exact with flash", lambda folder: {"exact": True, "flash_attention": "on"}, ConfigError, "flash"),
    ("exact with a small V", lambda folder: {"exact": True, "kv_type": "f16/q8_0"}, ConfigError, "kv_type="),
    ("exact and narrow", lambda folder: {"exact": True, "micro_batch_tokens": 1}, ConfigError, "micro_batch_tokens="),
]


def _text(path: Path) -> Path:
    path.write_text("not a model")
    return path


@pytest.mark.parametrize(("options", "kind", "word"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusals(
    kit: Path, folder: Path, options: Callable[[Path], dict[str, Any]], kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind) as caught:
        Model(kit, **{**RESIDENT, **options(folder)})
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recurrent_model_cannot_draft(folder: Path) -> None:
    with pytest.raises(NotSupported, match="cannot draft"):
        Model(make_model("llama", folder), draft=make_model("mamba", folder), **RESIDENT)


@pytest.fixture(autouse=True)
def _no_models_left() -> Iterator[None]:
    yield
    gc.collect()
