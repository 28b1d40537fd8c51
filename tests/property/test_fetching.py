"""Who is asked for which piece: each piece comes once, whoever fails, or it is said why not."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_run.runtime.fetch.schedule import MOST_WINDOW, TIMEOUT_S, Fetching

COUNT = 60


class FetchingMachine(RuleBasedStateMachine):
    @initialize(nodes=st.sets(st.sampled_from("abcd"), min_size=1))
    def begin(self, nodes: set[str]) -> None:
        self.fetching = Fetching(range(COUNT), sorted(nodes))
        self.nodes = nodes
        self.on_their_way: list[tuple[str, int]] = []
        self.had: list[int] = []
        self.now_s = 0.0
        self.most = 0

    @rule(passed_s=st.sampled_from([0.0, 0.01, 0.3, 1.0, TIMEOUT_S + 1]))
    def ask(self, passed_s: float) -> None:
        self.now_s += passed_s
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
            assert node in self.fetching.failures, "what was asked for is awaited, but of who failed"

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
