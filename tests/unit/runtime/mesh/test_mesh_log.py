"""What is recorded for saying it again: batches as they were run, less what was taken back wholly."""

from __future__ import annotations

import pytest

from edge_run.base.errors import ProtocolError
from edge_run.base.mesh import Message
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.batch_limits import Limits
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Decode, Operate, command_header, command_parts, read_command
from edge_run.runtime.mesh.replay import PlanTimes, replay_s

LIMITS = Limits(
    context_tokens=64, vocabulary=10, micro_batch_tokens=8, sequences=4, outputs_per_pass=2, can_branch=True
)


def batch(*positions: int, sequence: int = 0) -> Decode:
    return Decode(tuple(BatchToken(7, position, sequence) for position in positions))


def test_batches_keep_their_width() -> None:
    log = MeshLog()
    log.add(batch(0, 1, 2))
    log.add(batch(3))
    assert [len(command.batch) for command in log if isinstance(command, Decode)] == [3, 1]
    assert log.tokens == 4


def test_what_was_taken_back_wholly_is_forgotten() -> None:
    log = MeshLog()
    for positions in ((0, 1, 2), (3,), (4,)):
        log.add(batch(*positions))
    log.rewind(0, 3)
    assert list(log) == [batch(0, 1, 2)]
    log.rewind(0, 0)
    assert len(log) == 0


def test_what_was_taken_back_in_part_stays_and_is_cut_again() -> None:
    log = MeshLog()
    log.add(batch(0, 1, 2, 3))
    log.rewind(0, 2)
    assert list(log) == [batch(0, 1, 2, 3), Operate("rewind", (0, 2))]
    log.rewind(0, 0)
    assert len(log) == 0


def test_a_batch_that_does_not_follow_what_is_held_is_known() -> None:
    """Devices would compute it after nothing, where whoever says it was not told how far the text was cut."""
    log = MeshLog()
    assert log.holds(batch(0, 1, 2).batch)
    assert not log.holds(batch(3).batch)
    log.add(batch(0, 1, 2))
    log.add(Operate("branch", (0, 1)))
    tree = (BatchToken(7, 3, 0, True, (1,)), BatchToken(7, 4, 0), BatchToken(7, 4, 1))
    assert log.holds(tree)
    log.rewind(1, 0)
    assert not log.holds(tree), "its branch has no beginning"
    log.rewind(0, 2)
    assert not log.holds(batch(3).batch)
    assert log.holds(batch(2).batch)


def test_other_sequences_are_left_alone() -> None:
    log = MeshLog()
    log.add(batch(0, 1, sequence=1))
    log.add(batch(0, 1))
    log.rewind(1, 0)
    assert list(log) == [batch(0, 1, sequence=1), batch(0, 1), Operate("rewind", (1, 0))]
    log.rewind(1, 0)
    assert len(log) == 3, "it is empty already"
    log.rewind(0, 0)
    assert len(log) == 0, "nobody holds anything"


def test_a_log_that_is_too_long_is_condensed_to_what_is_held_in_the_passes_that_computed_it() -> None:
    log = MeshLog(most_tokens=12)
    shared = [Decode((BatchToken(7, i, 0), BatchToken(8, i, 1, True))) for i in range(3)]
    for command in shared:
        log.add(command)
    log.rewind(1, 0)
    log.add(Operate("branch", (0, 2)))
    assert list(log) == [*shared, Operate("rewind", (1, 0)), Operate("branch", (0, 2))]
    in_flight = Decode((BatchToken(9, 3, 0), BatchToken(6, 3, 2)))
    log.add(in_flight, None)
    *held, last = log
    assert held == [Decode((BatchToken(7, i, 0, branches=(2,)),)) for i in range(3)]
    assert last is in_flight
    assert log.tokens == 5


def test_what_is_in_flight_is_not_forgotten_before_it_is_finished() -> None:
    log, command = MeshLog(), batch(0, 1)
    log.add(command, None)
    log.rewind(0, 0)
    assert list(log) == [command, Operate("rewind", (0, 0))]
    log.finished(command, 1.0)
    log.rewind(0, 0)
    assert len(log) == 0
    log.add(command, None)
    log.forget(command)
    assert len(log) == 0


def sent(command: Decode | Operate) -> Message:
    parts = tuple(memoryview(bytes(part)) for part in command_parts(command))
    return Message("n", command_header(command, 5, 1), parts)


def test_commands_arrive_as_they_were_sent() -> None:
    tokens = (BatchToken(3, 0, 0, True), BatchToken(4, 1, 0, False, (2, 3)))
    for command in (Decode(tokens), Operate("keep", (0, 5, 2, 1, 2)), Operate("clear")):
        assert read_command(sent(command), LIMITS) == command


@pytest.mark.parametrize(
    "numbers",
    [(), (1, 0, 0, 1), (99, 0, 0, 1, 0), (-1, 0, 0, 1, 0), (1, -1, 0, 1, 0), (1, 0, 0, 1, 3), (1, 0, 0, 1, -1),
     (1, 0, 0, 2, 0), (1, 64, 0, 1, 0), (1, 0, 4, 1, 0), (1, 0, 0, 1, 1, 4), (1, 0, 0, 1, 1, 0), (1, 0, 0, 1, 2, 3, 3),
     (1, 0, 0, 1, 4, 0, 1, 2, 3), (1, 0, 0, 1, 0) * 3, (1, 0, 0, 0, 0) * 1000],
)  # fmt: skip
def test_what_cannot_be_a_batch_is_refused(numbers: tuple[int, ...]) -> None:
    message = sent(Operate("decode", numbers))
    with pytest.raises(ProtocolError):
        read_command(message, LIMITS)


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown"):
        read_command(sent(Operate("format_disk")), LIMITS)


def test_a_promise_counts_usual_tokens_a_slower_plan_and_what_is_read_besides() -> None:
    log = MeshLog()
    log.add(batch(*range(70)), 1.2)
    for i in range(70, 80):
        log.add(batch(i), 5.0 if i == 75 else 0.05)  # one was disturbed
    before = PlanTimes(0.05, 0.05, 0.5)
    assert replay_s(log, before, PlanTimes(0.0, 0.05, 0.5)) == pytest.approx(1.2 + 10 * 0.05 + 0.05)
    assert replay_s(log, before, PlanTimes(0.0, 0.04, 0.2)) == pytest.approx(1.75), "a faster one promises no more"
    assert replay_s(log, before, PlanTimes(0.0, 0.10, 2.0)) == pytest.approx(2 * 1.75 + 1.5)
    assert replay_s(log, before, PlanTimes()) == pytest.approx(1.75)
