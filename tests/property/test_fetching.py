"""Who is asked for which piece: each piece comes once, whoever fails, or it is said why not."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_run.devices.link.inbox import MOST_BULK_BYTES, MOST_BULK_MESSAGES
from edge_run.runtime.fetch.schedule import MOST_TOGETHER, MOST_WINDOW, TIMEOUT_S, Fetching
from edge_run.tiers.pieces import PIECE_BYTES

COUNT = 60


class FetchingMachine(RuleBasedStateMachine):
    @initialize(nodes=st.sets(st.sampled_from("abcd"), min_size=1))
    def begin(self, nodes: set[str]) -> None:
        self.fetching = Fetching(range(COUNT), sorted(nodes))
        self.nodes = nodes
        self.on_their_way: list[tuple[str, int]] = []
        self.had: list[int] = []
        self.now_s, self.is_late = 0.0, False
        self.most = 0

    @rule(passed_s=st.sampled_from([0.0, 0.01, 0.3, 1.0, TIMEOUT_S + 1]))
    def ask(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.is_late |= passed_s > TIMEOUT_S
        asked = self.fetching.next(self.now_s)
        assert all(node not in self.fetching.failures for node, _ in asked)
        self.on_their_way += asked
        for node in self.nodes:
            self.most = max(self.most, sum(one == node for one, _ in self.on_their_way))

    @precondition(lambda self: self.on_their_way)
    @rule(data=st.data())
    def come(self, data: st.DataObject) -> None:
        node, piece = data.draw(st.sampled_from(self.on_their_way))
        self.on_their_way.remove((node, piece))
        if self.fetching.was_asked(node, piece):
            self.fetching.came(node, piece, self.now_s)
            self.had.append(piece)
        else:
            assert node in self.fetching.failures or self.is_late, "what was asked for is awaited, but of who failed"

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.fetching.fail(data.draw(st.sampled_from(sorted(self.nodes))), "it is gone")

    @invariant()
    def holds(self) -> None:
        self.fetching.check()
        assert len(set(self.had)) == len(self.had), "a piece came twice"
        assert not self.fetching.is_done or sorted(self.had) == list(range(COUNT))
        assert self.fetching.is_done or self.fetching.is_stuck == (self.fetching.failures.keys() == self.nodes)

    def teardown(self) -> None:
        for _ in range(4 * COUNT):
            self.ask(0.0)
            while self.on_their_way:
                node, piece = self.on_their_way.pop(0)
                if self.fetching.was_asked(node, piece):
                    self.fetching.came(node, piece, self.now_s)
                    self.had.append(piece)
        assert self.fetching.is_done != self.fetching.is_stuck
        self.holds()


FetchingMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestFetching = FetchingMachine.TestCase


def test_the_window_grows_while_pieces_come_quickly_and_shrinks_when_not() -> None:
    fetching = Fetching(range(2000), ["a"])
    asked = [piece for _, piece in fetching.next(0.0)]
    assert len(asked) == 1
    while len(asked) < MOST_WINDOW:
        fetching.came("a", asked.pop(0), 0.0)
        asked += [piece for _, piece in fetching.next(0.0)]
    for _ in range(8):
        fetching.came("a", asked.pop(0), 10.0)
    while asked:
        fetching.came("a", asked.pop(0), 10.0)
    assert len(fetching.next(10.0)) == 1


def test_who_does_not_answer_is_asked_no_more() -> None:
    fetching = Fetching(range(3), ["a", "b"])
    assert fetching.next(0.0) == [("a", 0), ("b", 1)]
    fetching.came("b", 1, 0.1)
    assert fetching.next(TIMEOUT_S + 1) == [("b", 0), ("b", 2)]
    assert "did not send" in fetching.failures["a"]


def test_no_more_is_asked_of_all_together_than_may_wait_here() -> None:
    """The queue was full with five providers: what came was dropped, and who had sent it was blamed."""
    assert MOST_TOGETHER * PIECE_BYTES < MOST_BULK_BYTES
    assert MOST_TOGETHER < MOST_BULK_MESSAGES
    fetching = Fetching(range(1000), list("abcdefgh"))
    asked = fetching.next(0.0)
    for _ in range(10):  # all windows grow
        for node, piece in asked:
            fetching.came(node, piece, 0.0)
        asked = fetching.next(0.0)
    assert len(asked) == MOST_TOGETHER
    assert {node for node, _ in asked} == set("abcdefgh")


def test_who_has_sent_before_is_asked_once_more() -> None:
    fetching = Fetching(range(4), ["a"])
    fetching.came(*fetching.next(0.0)[0], 0.1)
    assert fetching.next(0.1) == [("a", 1), ("a", 2)]
    assert fetching.next(TIMEOUT_S + 1) == [("a", 1)], "what was dropped here is asked again"
    assert fetching.next(2 * TIMEOUT_S + 2) == []
    assert "did not send" in fetching.failures["a"]
    assert fetching.is_stuck
