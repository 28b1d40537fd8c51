"""A limit that falls while a model runs: weights give memory back, and take it again; what is computed is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

import slices
from control_groups import control_group
from edge_run.base.config import ModelConfig
from edge_run.base.units import KIB, MIB
from edge_run.devices.host import limit_watch
from edge_run.devices.host.memory import memory_groups, process_memory
from edge_run.runtime.slices.engine import SliceEngine
from exactness import open_at
from in_child import in_child
from talks import OPTIONS, Talk, check_rows
from tiny_models import make_model
from witness import Witness

MORE_THAN_THERE_IS = 1 << 40
FILLING = 4  # times that a talk goes on until as many experts are held as have room


def talk_on(talk: Talk) -> None:
    """Tokens one by one, a prompt, and guesses."""
    talk.step(2)
    talk.prompt(100)
    talk.verify(5, 2)
    talk.step(2)


@pytest.mark.parametrize(
    ("name", "scale", "by_expert"),
    [("llama", 4, False), ("gemma3", 1, False), ("falcon-h1", 1, False), ("qwen3moe", 1, True), ("deepseek2", 4, True)],
)
@in_child
def test_weights_give_up_what_is_taken_and_have_it_again(name: str, scale: int, by_expert: bool, folder: Path) -> None:
    path = make_model(name, folder, scale=scale)
    options = {**OPTIONS, "context_tokens": 2048}
    engine = open_at(path, 0.45, options, by_expert, chunk_bytes=32 * KIB)
    witness, taken = Witness(engine), [0]
    lender, notices = witness.lender, list[str]()
    lender.lacking_bytes = lambda: taken[0]
    engine.tell(notices.append)
    talk = Talk(engine.decoder, witness.look)
    talk.prompt(100)
    n_before = FILLING if by_expert else 1
    for _ in range(n_before):
        talk_on(talk)
    n_usual, held_bytes = lender.loans.n_loans, witness.weight_bytes()
    for share in (0.3, 0.6):
        taken[0] = int(share * -lender.loans.least_loans * lender.loans.loan_bytes)
        talk_on(talk)
        assert lender.loans.n_loans * lender.loans.loan_bytes + lender.loans.needed_bytes <= lender.loans.pool_bytes
        assert lender.loans.n_loans <= n_usual - taken[0] // lender.loans.loan_bytes
    assert witness.weight_bytes() < held_bytes - taken[0] // 2
    assert not notices
    taken[0] = MORE_THAN_THERE_IS
    talk_on(talk)
    assert lender.loans.n_loans == lender.loans.least_loans < 0
    assert len(notices) == 1
    assert "limit" in notices[0]
    taken[0] = 0
    talk_on(talk)
    talk.rewind(200)
    talk.step(2)
    assert lender.loans.n_loans >= n_usual - 2
    assert len(notices) == 1
    engine.close()

    def all_of_it(wanted: Talk) -> None:
        wanted.prompt(100)
        for _ in range(n_before + 4):
            talk_on(wanted)
        wanted.rewind(200)
        wanted.step(2)

    check_rows(path, all_of_it, options, talk)


@pytest.mark.parametrize(("name", "room"), [("llama", "visits"), ("qwen3moe", "experts")])
@in_child
def test_slices_give_up_what_is_taken_and_have_it_again(name: str, room: str, folder: Path) -> None:
    """What streams of a stage visit is held for all of it, until what is always lent otherwise is taken."""
    path = make_model(name, folder, scale=2 if name == "llama" else 1)
    options, taken = {**OPTIONS, "context_tokens": 2048}, [0]
    by_visits: list[bool] = []
    with slices.least_lent():
        engines = {
            node: SliceEngine.open(path, ModelConfig(memory="8GiB", **options, chunk_bytes=8 * KIB)) for node in "ab"
        }
    with slices.room_for(room, path.stat().st_size):
        together = slices.Together(engines, slices.owners_of(len(engines["a"].layout.units), [1, 1]))
    assignments = [engine._assignment for engine in engines.values()]
    for assignment in assignments:
        assert assignment
        assert assignment.lent_residency
        assignment.lent_residency.lacking_bytes = lambda: taken[0]

    def all_of_it(talk: Talk) -> None:
        talk.prompt(100)
        by_visits.clear()
        for taken[0] in (0, 64 * KIB, MORE_THAN_THERE_IS, 0):
            talk_on(talk)
            by_visits.append(all(assignment and assignment._by_visits for assignment in assignments))

    said, witnesses = slices.say_known(together, all_of_it)
    assert by_visits[::2] == [room == "visits", False]
    assert by_visits[-1] == (room == "visits")
    for witness in witnesses:
        assert min(witness.counts) == witness.lender.loans.least_loans < 0
        assert witness.counts[-1] > 0
    for engine in engines.values():
        engine.close()
    check_rows(path, all_of_it, options, said)


@pytest.mark.root
def test_the_limit_of_a_control_group(folder: Path) -> None:
    """It falls before the weights are read, and rises again."""
    limit = str(2048 * MIB)
    with control_group({"memory.max": limit}, "memory", {"memory.limit_in_bytes": limit}) as group:
        _limited(path=make_model("llama", folder, scale=16), group=group)


@in_child
def _limited(path: Path, group: Path) -> None:
    (group / "cgroup.procs").write_text("0")
    limit_watch.PERIOD_S = 0.0
    innermost = next(memory_groups())
    assert innermost.folder == group
    options = {**OPTIONS, "context_tokens": 2048}
    engine = open_at(path, 0.6, options, chunk_bytes=32 * KIB)
    limit_bytes = sum(item.size_bytes for item in engine.plan.items) - 20 * MIB
    (group / innermost.limit_name).write_text(str(limit_bytes))
    talk, witness = Talk(engine.decoder), Witness(engine)
    talk.prompt(100)
    talk_on(talk)
    assert witness.lender.loans.n_loans < 0
    assert process_memory().resident_bytes <= limit_bytes
    assert engine.memory_use.peak_bytes <= limit_bytes
    (group / innermost.limit_name).write_text(str(2048 * MIB))
    talk_on(talk)
    assert witness.lender.loans.n_loans >= 0
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()

    def all_of_it(wanted: Talk) -> None:
        wanted.prompt(100)
        talk_on(wanted)
        talk_on(wanted)

    check_rows(path, all_of_it, options, talk)
