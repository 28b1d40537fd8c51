"""The merge gate for keys and values in a file while several texts share passes: each has llama.cpp's logits.

Whatever is complete is sent away before every pass, as in test_spill.py. llama.cpp has cells of their own for the same
sequences there (`kv_unified=False`), all of them in memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from eager import Eager
from edge_run import AsyncModel, Model, Piece
from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, NotSupported, TierReadError
from edge_run.base.units import KIB, MIB
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.llama import context_shape
from edge_run.runtime.planning import spill_terms
from edge_run.runtime.scheduling.widths import PassWidths
from edge_run.tiers import weights
from edge_run.tiers.kv.spill import Spill
from in_child import in_child
from kit_models import KIT
from spilling import open_spilling, open_whole, spill_of
from talks import OPTIONS, SEQUENCES, TEXT, WIDTH, Talk
from tiny_models import make_model

MANY: dict[str, Any] = {**OPTIONS, "sequences": SEQUENCES}


class Talks:
    """Several texts, said to one decoder. ends: of each, by sequence."""

    def __init__(self, engine: Engine, after_pass: Callable[[], None] = lambda: None) -> None:
        self._talk = Talk(engine.decoder, after_pass)
        self.ends = dict.fromkeys(range(SEQUENCES), 0)

    @property
    def rows(self) -> list[np.ndarray]:
        return self._talk.rows

    def prompt(self, sequence: int, n_tokens: int) -> None:
        """Read more of a text, alone."""
        stop = self.ends[sequence] + n_tokens
        for start in range(self.ends[sequence], stop, WIDTH):
            part = range(start, min(start + WIDTH, stop))
            self._talk.decode([self._talk.token(i, sequence, wants_logits=i == part[-1]) for i in part])
        self.ends[sequence] = stop

    def step(self, sequences: Sequence[int], n_tokens: int = 1) -> None:
        """Compute the next tokens of several texts, in passes that they share."""
        for _ in range(n_tokens):
            self._talk.decode([self._talk.token(self.ends[one], one) for one in sequences])
            for one in sequences:
                self.ends[one] += 1

    def cut(self, sequence: int, position: int) -> None:
        self.ends[sequence] = self._talk.decoder.rewind(sequence, position)
        self.rows.append(np.array([self.ends[sequence]]))


def say_much(talks: Talks) -> None:
    """Texts of all lengths that begin, share passes, are cut, end, and make room for others."""
    for sequence, n_tokens in ((0, 300), (1, 130), (2, 520), (3, 20)):
        talks.prompt(sequence, n_tokens)
        talks.step(range(sequence + 1), 2)
    talks.step([0, 3], 2)  # those between are padded
    talks.prompt(1, 200)
    talks.step([1, 2, 3])
    talks.cut(1, 0)
    talks.step([0, 2, 3], 2)
    talks.cut(2, 290)
    talks.step([0, 2], 2)
    talks.prompt(1, 400)
    talks.cut(0, 0)
    talks.cut(3, 0)
    talks.step([1, 2])
    talks.prompt(0, 270)
    talks.step([0, 1, 2], 2)
    for sequence in range(SEQUENCES):
        talks.cut(sequence, 0)
    talks.prompt(3, 70)
    talks.step([3], 2)


def say_alone(talks: Talks) -> None:
    """One text that grows and is cut."""
    talks.prompt(0, 300)
    talks.step([0], 3)
    talks.cut(0, 150)
    talks.prompt(0, 200)
    talks.step([0], 2)


def check_all(spill: Spill) -> None:
    for states in spill.texts:
        states.check()


def check_logits(found: Talks, script: Callable[[Talks], None], path: Path, options: dict[str, Any]) -> None:
    """Compare the logits of `script` with those of llama.cpp's own loader, with as many streams."""
    plain = Engine.open(path, ModelConfig(**{**MANY, **options}, backend="llama.cpp"))
    assert plain.shape.has_streams == (plain.shape.sequences > 1)
    wanted = Talks(plain)
    script(wanted)
    assert all(np.array_equal(a, b) for a, b in zip(wanted.rows, found.rows, strict=True))
    plain.close()


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3"])
@in_child
def test_texts_that_share_passes(name: str, folder: Path) -> None:
    spill_terms.ATTENTIONS_AT_ONCE = 1
    path = make_model(name, folder)
    engine = open_spilling(path, folder, sequences=SEQUENCES)
    assert engine.shape.has_streams
    spill = spill_of(engine)
    spill.room_bytes = 0
    found = Talks(engine, lambda: check_all(spill))
    say_much(found)
    figures = engine.kv_spill
    assert figures is not None
    assert figures.read_bytes > figures.written_bytes > 0
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()
    context_shape.wants_streams = lambda config: config.sequences > 1  # type: ignore[assignment]
    check_logits(found, say_much, path, {})


def open_beside_values(path: Path, folder: Path, options: dict[str, Any]) -> Engine:
    """Open `path` in the least memory in which values have room."""
    memory = 60 * MIB
    while True:
        config = ModelConfig(memory=memory, kv_spill=folder, chunk_bytes=32 * KIB, **{**MANY, **options})
        try:
            engine = Engine.open(path, config)
        except BudgetError as error:
            memory = error.minimum_bytes
        except NotSupported:
            memory += 8 * MIB
        else:
            assert engine.plan.spilled_kv_bytes, "keys have room wherever values have"
            return engine


@pytest.mark.parametrize(("name", "n_sequences"), [("llama", 1), ("qwen3moe", SEQUENCES)])
@in_child
def test_exact_texts_keep_values_in_memory(name: str, n_sequences: int, folder: Path) -> None:
    """Without flash attention values lie in columns; keys go to the file, one text or several."""
    spill_terms.ATTENTIONS_AT_ONCE = 1
    path, options = make_model(name, folder), {"exact": True, "sequences": n_sequences, "outputs_per_pass": 8}
    options["context_tokens"] = 65_536
    engine = open_beside_values(path, folder, options)
    spill = spill_of(engine)
    spill.room_bytes = 0
    found, script = Talks(engine, lambda: check_all(spill)), say_much if n_sequences > 1 else say_alone
    script(found)
    figures = engine.kv_spill
    assert figures is not None
    assert figures.read_bytes > figures.written_bytes > 0
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()
    check_logits(found, script, path, options)


@in_child
def test_a_text_that_ends_gives_back_memory_and_file(folder: Path) -> None:
    engine = open_whole(make_model("llama", folder), folder, sequences=SEQUENCES)
    spill = spill_of(engine)
    spill.room_bytes = 0
    talks = Talks(engine)
    for sequence in range(SEQUENCES):
        talks.prompt(sequence, 600)
    talks.step(range(SEQUENCES))
    talks.step(range(SEQUENCES))

    def on_drive() -> int:
        return 512 * os.fstat(spill.file._fd).st_blocks

    all_away, all_there = spill.away_bytes, on_drive()
    assert all_there >= all_away > 0
    talks.cut(1, 0)
    talks.cut(3, 0)
    talks.step([0, 2])
    assert spill.away_bytes == pytest.approx(all_away / 2, rel=0.05)
    assert on_drive() == pytest.approx(all_there / 2, rel=0.05)
    spill.room_bytes = 1 << 40
    talks.cut(2, 0)
    talks.step([0])
    assert spill.away_bytes == 0, "there is room again for the one that is left"
    talks.cut(0, 0)
    talks.prompt(0, 2)
    assert on_drive() == 0
    engine.close()


PROMPTS = [TEXT[:300], TEXT[100:200], TEXT[7:457], TEXT[50:90], TEXT[300:560], TEXT[20:33], TEXT[11:231]]


def open_model(path: Path, folder: Path, memory: int | None, **more: Any) -> Model:
    """Open a model whose passes are the same however fast they are; where `memory` is given, so that not all fits."""
    PassWidths.with_prompts = lambda self, n_answers, are_few=False: self.most_tokens  # type: ignore[method-assign]
    options = {**MANY, "kv_spill": folder / "spill", "chunk_bytes": 32 * KIB, **more}
    model = Model(path, **options, memory=memory)
    while memory and not model.plan.spilled_kv_bytes:  # what the program takes differs a little from model to model
        model.close()
        memory -= MIB // 2
        model = Model(path, **options, memory=memory)
    if memory:
        spill_of(model._engine).room_bytes = 0
    return model


def small_memory(path: Path, folder: Path, **more: Any) -> int:
    engine = open_whole(path, folder, sequences=SEQUENCES, **more)
    engine.close()
    return engine.budget_bytes


def answers(model: Model) -> list[tuple[int, ...]]:
    return [one.token_ids for one in model.generate_many(PROMPTS, max_tokens=24, temperature=0).results()]  # type: ignore[union-attr]


@in_child
def test_many_answers_are_those_of_a_run_without(folder: Path) -> None:
    """More requests than sequences, so that texts end and others begin; in Python, and as tasks of one event loop."""
    path = make_model("llama", folder)
    with open_model(path, folder, None) as plenty:
        assert plenty.stats.kv_spill is None
        wanted = answers(plenty)
    with open_model(path, folder, small_memory(path, folder)) as model:
        results = model.generate_many(PROMPTS, max_tokens=24, temperature=0).results()
        assert [one.token_ids for one in results] == wanted  # type: ignore[union-attr]
        assert results[2].numerics.batching == "streams"  # type: ignore[union-attr]
        figures, memory = model.stats.kv_spill, model.stats.memory
        assert figures is not None
        assert figures.read_bytes > figures.written_bytes > 0
        assert memory.peak_bytes <= memory.budget_bytes

        async def ask() -> None:
            found: dict[int, list[Piece]] = {}
            async with AsyncModel.of(model) as shared, anyio.create_task_group() as group:

                async def one(number: int) -> None:
                    stream = shared.generate(PROMPTS[number], max_tokens=24, temperature=0)
                    found[number] = [piece async for piece in stream]

                for number in range(len(PROMPTS)):
                    group.start_soon(one, number)
            said = [tuple(token for piece in found[i] for token in piece.token_ids) for i in range(len(PROMPTS))]
            assert [len(text) for text in said] == [len(text) for text in wanted]

        anyio.run(ask)


@pytest.mark.parametrize("drafter", ["draft model", "text"])
@in_child
def test_guesses_of_many_texts_are_verified_and_cut(drafter: str, folder: Path) -> None:
    """They are chains; each answer is that of a run in which nothing is away, with the same guesses."""
    speculation_setup.WidthControl = Eager  # type: ignore[misc]
    path = make_model("llama", folder)
    options: dict[str, Any] = {"draft_tokens": 15, "outputs_per_pass": 16}
    if drafter == "draft model":
        options["draft"] = make_model("llama", folder, quantisation="Q8_0")
    else:
        options["speculate"] = "ngram"
    with open_model(path, folder, None, **options) as plenty:
        wanted = answers(plenty)
    with open_model(path, folder, small_memory(path, folder, **options), **options) as model:
        assert answers(model) == wanted
        figures, guessed, memory = model.stats.kv_spill, model.speculation, model.stats.memory
        assert figures is not None
        assert figures.read_bytes > figures.written_bytes > 0
        assert "a chain, not a tree" in guessed.reason
        assert guessed.drafted > guessed.accepted >= (30 if drafter == "draft model" else 0)
        assert memory.peak_bytes <= memory.budget_bytes
        check_all(spill_of(model._engine))


@pytest.mark.parametrize("call", ["write", "read_into"])
@in_child
def test_what_the_drive_refuses_leaves_all_texts(call: str, folder: Path) -> None:
    """What was said stays, the error is one line; when the drive works again, all go on where they were."""
    weights.PAUSE_S = 0.01  # type: ignore[attr-defined]  # hundreds of reads fail, each after a pause
    path = make_model("llama", folder)
    with open_model(path, folder, None) as plenty:
        wanted = answers(plenty)
    with open_model(path, folder, small_memory(path, folder)) as model:
        spill, batch = spill_of(model._engine), model.open_batch()
        numbers = {batch.submit(model.begin(_request(one)), _request(one).turn): i for i, one in enumerate(PROMPTS)}
        said: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
        real, n_passes = getattr(spill.file, call), 0

        def refuse(*_: int) -> int:
            raise TierReadError("refused", errno=errno.EIO)

        n_refused = 0
        while not batch.is_idle:
            n_passes += 1
            setattr(spill.file, call, refuse if n_passes % 2 else real)
            try:
                events = batch.advance()
            except TierReadError:
                n_refused += 1
                check_all(spill)
                continue
            for event in events:
                assert event.piece is not None
                said[numbers[event.request]] += event.piece.token_ids
        assert n_refused > 3
        assert [tuple(text) for text in said.values()] == wanted
        batch.close()


def _request(prompt: Sequence[int]) -> Any:
    from edge_run.runtime.generation.request import make_request

    return make_request(prompt, max_tokens=24, temperature=0)


@in_child
def test_a_full_drive_ends_the_answer_that_began_last(folder: Path) -> None:
    """The others go on where it was, and have its room."""
    path = make_model("llama", folder)
    with open_model(path, folder, small_memory(path, folder)) as model:
        spill = spill_of(model._engine)
        write, most_bytes, taken = spill.file.write, [1 << 40], [0]

        def write_some(address: int, length: int, offset: int) -> None:
            taken[0] = max(taken[0], 512 * os.fstat(spill.file._fd).st_blocks + length)
            if 512 * os.fstat(spill.file._fd).st_blocks + length > most_bytes[0]:
                raise TierReadError("no room", errno=errno.ENOSPC)
            write(address, length, offset)

        spill.file.write = write_some  # type: ignore[method-assign]
        prompts = [TEXT[i : i + 448] for i in range(3)]
        plenty = model.generate_many(prompts, max_tokens=24, temperature=0).results()
        assert not any(isinstance(one, Exception) for one in plenty)
        most_bytes[0] = taken[0] * 3 // 4
        *others, last = model.generate_many(prompts, max_tokens=24, temperature=0).results()
        assert isinstance(last, TierReadError)
        assert str(last) == "no room"
        assert [one.token_ids for one in others] == [one.token_ids for one in plenty[:2]]  # type: ignore[union-attr]


def answers_but_one(model: Model) -> list[list[int]]:
    """What four requests say, of which one is cancelled when it has five tokens."""
    batch = model.open_batch()
    numbers = [batch.submit(model.begin(_request(one)), _request(one).turn) for one in PROMPTS[:4]]
    said: dict[int, list[int]] = {number: [] for number in numbers}
    while not batch.is_idle:
        for event in batch.advance():
            assert event.piece is not None
            said[event.request] += event.piece.token_ids
        if len(said[numbers[2]]) == 5:
            batch.cancel(numbers[2])
    batch.close()
    return list(said.values())


@in_child
def test_an_answer_that_is_cancelled_leaves_the_others(folder: Path) -> None:
    path = make_model("llama", folder)
    with open_model(path, folder, None) as plenty:
        wanted = answers_but_one(plenty)
    with open_model(path, folder, small_memory(path, folder)) as model:
        assert answers_but_one(model) == wanted
    assert len(wanted[2]) == 5 < len(wanted[0])


@in_child
def test_texts_are_as_long_as_there_is_room_for(folder: Path) -> None:
    """Also where all weights stay, so that nothing has a use for what is not in use."""
    with pytest.raises(BudgetError) as refusal:
        Engine.open(KIT, ModelConfig(memory=40 * MIB, kv_spill=folder, **MANY))
    for more in range(1, 16):
        memory = refusal.value.minimum_bytes + more * MIB
        engine = Engine.open(KIT, ModelConfig(memory=memory, kv_spill=folder, **MANY))
        room, plan = engine.decoder.capabilities.context_tokens, engine.plan
        engine.close()
        assert 0 < room <= plan.context_tokens // SEQUENCES < MANY["context_tokens"] // SEQUENCES
        if plan.window_bytes == plan.spilled_kv_bytes == 0:
            return
    raise AssertionError("there is no budget for all weights and a part of the context")


@in_child
def test_texts_with_recurrent_state_take_turns(folder: Path) -> None:
    engine = open_spilling(make_model("falcon-h1", folder), folder, sequences=SEQUENCES)
    assert engine.config.sequences == 1
    engine.close()
