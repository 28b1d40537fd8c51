"""The merge gate for keys and values in a file: logits are llama.cpp's, whatever of the context is away.

Whatever is complete is sent away before every pass, so that each attention brings all of its rows. What is away is
unreadable, so a read of it elsewhere ends the child process that a test runs in.
"""

from __future__ import annotations

import errno
import random
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from default_kernels import needs_default_kernels
from eager import Eager
from edge_run import Model
from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled, TierReadError
from edge_run.base.protocols import BatchToken, Logits
from edge_run.base.units import KIB
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.planning import spill_terms
from edge_run.runtime.streaming.experts import ExpertStreaming
from in_child import in_child
from spilling import open_spilling, open_whole, spilled_of
from talks import OPTIONS, TEXT, Talk, check_rows
from tiny_models import make_model, make_trained_on
from witness import Witness

# Attention alone: grouped heads, biases, latent, shared, looped, experts. Then windows and states beside it.
ROWS = ["llama", "gpt2", "phi3", "deci", "command-r", "minicpm3", "hrm_text", "qwen3moe", "deepseek2"]
OTHERS = ["gemma3", "llama4", "gpt-oss", "falcon-h1"]


def compare(
    path: Path, script: Callable[[Talk], None], attentions: int = 1, by_expert: bool = False, **options: Any
) -> None:
    """Assert that a run that sends away all it can is llama.cpp's."""
    spill_terms.ATTENTIONS_AT_ONCE = attentions
    engine = open_spilling(path, path.parent, by_expert=by_expert, **options)
    spill = spilled_of(engine).spill
    spill.room_bytes = 0
    found = Talk(engine.decoder, spill.texts[0].check)
    script(found)
    figures = engine.kv_spill
    assert figures is not None
    assert figures.read_bytes > figures.written_bytes > 0
    if by_expert:
        assert engine.plan.expert_bytes > 0
        (stream,) = (one for one in engine._supplied.streams if isinstance(one, ExpertStreaming))
        assert stream.usage.spilled is spill
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()
    assert list((path.parent / "spill").iterdir()) == []
    check_rows(path, script, {**OPTIONS, **options}, found)


def say_much(talk: Talk) -> None:
    """A text that grows over several pieces, and is cut in what is away, between pieces and to nothing."""
    talk.prompt(200)
    talk.step(3)
    talk.verify(5, 2)
    talk.prompt(150)
    talk.step(2)
    talk.rewind(150)
    talk.step(2)
    talk.prompt(80)
    talk.rewind(128)
    talk.prompt(64)
    talk.step(1)
    talk.clear()
    talk.step(1)
    talk.prompt(70)
    talk.step(1)


@pytest.mark.parametrize("name", ROWS)
@in_child
def test_attention_alone(name: str, folder: Path) -> None:
    compare(make_trained_on(8192, name, folder), say_much)


@pytest.mark.parametrize("name", OTHERS)
@in_child
def test_windows_and_states_stay_in_memory(name: str, folder: Path) -> None:
    compare(make_model(name, folder), say_much)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"attentions": 2}),
        ("llama", {"kv_type": "q8_0"}),
        ("qwen3", {"kv_type": "q8_0/q4_0"}),
        ("qwen3moe", {"by_expert": True, "context_tokens": 32_768}),
        pytest.param("llama", {"repack": "on"}, marks=needs_default_kernels),
    ],
    ids=["two at once", "q8_0", "q8_0/q4_0", "by expert", "repacked"],
)
@in_child
def test_other_ways(name: str, options: dict[str, Any], folder: Path) -> None:
    compare(make_model(name, folder), say_much, **options)


@in_child
def test_passes_wider_than_a_piece(folder: Path) -> None:
    def say(talk: Talk) -> None:
        for start, stop in ((0, 512), (512, 700), (700, 701), (701, 1213)):
            talk.decode([talk.token(i, wants_logits=i >= stop - 2) for i in range(start, stop)])
            talk.position = stop
        talk.rewind(600)
        talk.decode([talk.token(i, wants_logits=i == 1111) for i in range(600, 1112)])

    compare(make_model("llama", folder), say, micro_batch_tokens=512)


@in_child
def test_a_context_is_filled_in_its_budget(folder: Path) -> None:
    """Nothing is sent away before it must, each byte is written once, and the plan says what a token reads."""
    spill_terms.ATTENTIONS_AT_ONCE = 1
    path, options = make_model("llama", folder), {"context_tokens": 3072, "micro_batch_tokens": 256}
    engine = open_whole(path, folder, **options)
    plan, spilled = engine.plan, spilled_of(engine)

    def fill(talk: Talk) -> None:
        for start in range(talk.position, 3070, 256):
            stop = min(start + 256, 3070)
            talk.decode([talk.token(i, wants_logits=i == stop - 1) for i in range(start, stop)])
            talk.position = stop

    def say(talk: Talk) -> None:
        talk.prompt(256)
        fill(talk)
        talk.step(1)
        talk.rewind(100)
        talk.step(3)

    talk = Talk(engine.decoder)
    talk.prompt(256)
    assert spilled.figures.written_bytes == 0, "weights give way first"
    fill(talk)
    before = spilled.figures
    talk.step(1)
    after = spilled.figures
    assert plan.spilled_kv_bytes < after.away_bytes < 1.5 * plan.spilled_kv_bytes, "a layer of it is in memory in turn"
    assert after.written_bytes == after.away_bytes
    point = plan.by_context[-1]
    assert point.tokens == 3071
    assert point.kv_bytes_per_pass == pytest.approx(after.away_bytes, rel=0.1), "each attention reads its own"
    assert after.read_bytes - before.read_bytes == pytest.approx(after.away_bytes, rel=0.4), "some was on its way"
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    talk.rewind(100)
    talk.step(3)
    assert spilled.figures.away_bytes == 0, "there is room again"
    assert spilled.figures.written_bytes == after.written_bytes
    engine.close()
    check_rows(path, say, {**OPTIONS, **options}, talk)


@pytest.mark.parametrize("call", ["write", "read_into"])
@in_child
def test_what_the_drive_refuses_ends_the_pass_alone(call: str, folder: Path) -> None:
    """The text is as it was before the pass; when the drive works again, it goes on."""
    path = make_model("llama", folder)
    engine = open_spilling(path, folder)
    spill = spilled_of(engine).spill
    spill.room_bytes = 0
    talk = Talk(engine.decoder)
    talk.prompt(300)
    real = getattr(spill.file, call)

    def refuse(*_: int) -> int:
        raise TierReadError("refused", errno=errno.ENOSPC)

    setattr(spill.file, call, refuse)
    for _ in range(2):
        with pytest.raises(TierReadError, match="refused"):
            engine.decoder.decode([talk.token(i, wants_logits=i == 599) for i in range(300, 600)])
        spill.texts[0].check()
        assert engine.decoder._lengths()[0] == 300
    setattr(spill.file, call, real)
    talk.prompt(300)
    talk.step(2)
    engine.close()

    def in_two(wanted: Talk) -> None:
        wanted.prompt(300)
        wanted.prompt(300)
        wanted.step(2)

    check_rows(path, in_two, OPTIONS, talk)


@in_child
def test_a_full_drive_leaves_what_was_said(folder: Path) -> None:
    """Here the drive is one that takes no larger file than two pieces of the last tensor make it."""
    path = make_model("llama", folder)
    engine = open_spilling(path, folder)
    memory = engine.budget_bytes
    engine.close()
    options = {**OPTIONS, "kv_spill": folder / "spill", "chunk_bytes": 32 * KIB, "memory": memory}
    with Model(path, **options) as model:
        spill = spilled_of(model._engine).spill
        spill.room_bytes = 0
        last = spill._space.spans[-1]
        most_bytes = last.start - last.base + 2 * spill._space.chunk_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
        answer, said = model.generate(TEXT[:160], temperature=0, max_tokens=600), []
        with pytest.raises(TierReadError, match="File too large") as refusal:
            said += iter(answer)
        assert refusal.value.exit_code == 5
        assert "\n" not in str(refusal.value)
        assert len(said) > 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        again = model.generate(TEXT[:160], temperature=0, max_tokens=len(said)).result()
        assert again.token_ids == tuple(piece.token_ids[0] for piece in said)


@in_child
def test_a_stop_while_rows_are_awaited(folder: Path) -> None:
    path = make_model("llama", folder)
    engine = open_spilling(path, folder)
    spill = spilled_of(engine).spill
    spill.room_bytes = 0
    talk = Talk(engine.decoder)
    talk.prompt(300)
    begin, n_left = spill.begin, [2]

    def stop(use: tuple[int, ...]) -> None:
        n_left[0] -= 1
        if not n_left[0]:
            raise Cancelled("stopped")
        begin(use)

    spill.begin = stop  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        talk.step(1)
    spill.begin = begin  # type: ignore[method-assign]
    assert engine.decoder._lengths()[0] == 300
    talk.step(3)
    engine.close()

    def again(wanted: Talk) -> None:
        wanted.prompt(300)
        wanted.step(3)

    check_rows(path, again, OPTIONS, talk)


@in_child
def test_room_is_lent_and_taken_beside_what_is_away(folder: Path) -> None:
    """Weights have what passes leave, give way as the text grows, and give up more when a limit falls."""
    path = make_model("llama", folder)
    engine = open_spilling(path, folder)
    spilled, witness, taken = spilled_of(engine), Witness(engine), [0]
    witness.lender.lacking_bytes = lambda: taken[0]
    spilled.spill.room_bytes = 0
    loans, talk = witness.lender.loans, Talk(engine.decoder, witness.look)
    talk.step(1)
    n_first = loans.n_loans
    assert n_first > loans.least_loans < 0
    found = []
    for taken[0] in (0, 1 << 40, 0):
        talk.prompt(200)
        talk.step(2)
        found.append(loans.n_loans)
        assert spilled.figures.away_bytes > 0
    assert found[1] == loans.least_loans < found[2] <= found[0] <= n_first
    talk.rewind(100)
    talk.step(2)
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()

    def say(wanted: Talk) -> None:
        wanted.step(1)
        for _ in range(3):
            wanted.prompt(200)
            wanted.step(2)
        wanted.rewind(100)
        wanted.step(2)

    check_rows(path, say, OPTIONS, talk)


class Recorded:
    """Does what a decoder does, and notes it, with the logits that came of it."""

    def __init__(self, decoder: LocalDecoder, check: Callable[[], None]) -> None:
        self._decoder, self._check, self.capabilities = decoder, check, decoder.capabilities
        self.calls: list[tuple[Any, ...]] = []
        self.rows: list[np.ndarray] = []

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        self.calls.append(("decode", tuple(batch)))
        self.rows.append(self._decoder.decode(batch).copy())
        self._check()
        return self.rows[-1]

    def rewind(self, sequence: int, position: int) -> int:
        self.calls.append(("rewind", sequence, position))
        return self._decoder.rewind(sequence, position)


@pytest.mark.parametrize("is_drafted", [False, True])
@in_child
def test_guesses_are_verified_and_cut(is_drafted: bool, folder: Path) -> None:
    """Every pass that verified guesses, and every one after guesses were cut, has llama.cpp's logits."""
    path, rng = make_model("llama", folder), random.Random(0)
    options: dict[str, Any] = {"draft": path} if is_drafted else {"speculate": "ngram"}
    options |= {"draft_tokens": 5, "outputs_per_pass": 6}
    speculation_setup.WidthControl = Eager  # type: ignore[misc]
    engine = open_spilling(path, folder, **options)
    spilled = spilled_of(engine)
    spilled.spill.room_bytes = 0
    recorded = Recorded(engine.decoder, spilled.spill.texts[0].check)
    engine._mesh = recorded  # type: ignore[assignment]
    session = open_session(engine)
    assert "a chain, not a tree" in session.speculation().reason
    logits, _ = session.feed(TEXT[:70] * 4)
    for i in range(150):  # what was said before, what the model says, and what nobody expects
        logits = session.step(rng.choice([TEXT[i % 70], int(logits.argmax()), TEXT[i % 70], 7]))
    session.finish()
    figures = session.speculation()
    assert figures.drafted > figures.accepted > (0 if is_drafted else 10)
    assert spilled.figures.read_bytes > spilled.figures.written_bytes > 0
    assert any(call[0] == "rewind" for call in recorded.calls)
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    assert spilled.figures.written_bytes == spilled.figures.away_bytes, "no guess was ever written"
    engine._mesh = None
    engine.close()
    plain = Engine.open(path, ModelConfig(**{**OPTIONS, "outputs_per_pass": 6, "backend": "llama.cpp"}))
    rows = iter(recorded.rows)
    for what, *arguments in recorded.calls:
        if what == "rewind":
            plain.decoder.rewind(*arguments)
        else:
            assert np.array_equal(plain.decoder.decode(*arguments), next(rows))
    plain.close()
