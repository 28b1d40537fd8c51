"""The log of a run: what is left of it fills empty caches with what they would hold had nothing been left out."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_run.base.protocols import BatchToken
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Command, Decode, Operate

SEQUENCES, TEXTS = 6, 4  # those of texts come first, the others are for branches
CONTEXT = 24

Caches = dict[int, list[int]]


def carried_out(commands: Iterable[Command]) -> Caches:
    """Return what sequences hold after `commands`; a batch that llama.cpp would refuse is a failure."""
    caches: Caches = {sequence: [] for sequence in range(SEQUENCES)}
    for command in commands:
        if isinstance(command, Decode):
            for token in command.batch:
                prefixes = [caches[sequence] for sequence in (token.sequence, *token.branches)]
                assert all(prefix == prefixes[0] for prefix in prefixes), "they hold the same up to here"
                assert len(prefixes[0]) == token.position, "without a gap"
                for prefix in prefixes:
                    prefix.append(token.token)
        elif command.what == "branch":
            for branch in command.numbers[1:]:
                caches[branch] = list(caches[command.numbers[0]])
        elif command.what == "keep":
            sequence, position, branch, *branches = command.numbers
            caches[sequence][position:] = caches[branch][position:]
            for other in branches:
                caches[other] = []
        else:
            del caches[command.numbers[0]][command.numbers[1] :]
    return caches


class World:
    """Says things to a log as a decoder does, and remembers them all."""

    def __init__(self, draw: st.DataObject, most_tokens: int) -> None:
        self.draw, self.log = draw, MeshLog(most_tokens)
        self.said: list[Command] = []
        self.begun: list[Decode] = []
        self.n_tokens = 0

    @property
    def caches(self) -> Caches:
        return carried_out(self.said)

    def token(self, position: int, sequence: int, *branches: int) -> BatchToken:
        self.n_tokens += 1
        return BatchToken(self.n_tokens, position, sequence, branches=branches)

    def begin(self, batch: list[BatchToken]) -> None:
        """A pass; it may stay in flight while others are begun, or be taken back at once."""
        command = Decode(tuple(batch))
        self.log.add(command, None)
        if self.draw.draw(st.integers(0, 9)) == 0:
            self.log.forget(command)
            return
        self.said.append(command)
        self.begun.append(command)
        self.finish(self.draw.draw(st.integers(0, 2)))

    def finish(self, n_left: int) -> None:
        while len(self.begun) > n_left:
            self.log.finished(self.begun.pop(0), 0.1)

    def operate(self, what: str, *numbers: int) -> None:
        self.said.append(Operate(what, numbers))
        self.log.add(self.said[-1])

    def rewind(self, sequence: int, end: int) -> None:
        if end <= len(self.caches[sequence]):
            self.said.append(Operate("rewind", (sequence, end)))
            self.log.rewind(sequence, end)

    def decode(self) -> None:
        """A pass that some texts share, each with a few tokens."""
        caches, batch = self.caches, list[BatchToken]()
        for sequence in self.draw.draw(st.sets(st.integers(0, TEXTS - 1), min_size=1)):
            start = len(caches[sequence])
            end = min(CONTEXT, start + self.draw.draw(st.integers(1, 3)))
            batch += [self.token(position, sequence) for position in range(start, end)]
        if batch:
            self.begin(batch)

    def guess(self) -> None:
        """A pass over a tree of guesses with two leaves, one of which is followed for a while."""
        sequence, branch = self.draw.draw(st.integers(0, TEXTS - 1)), self.draw.draw(st.integers(TEXTS, SEQUENCES - 1))
        start = len(self.caches[sequence])
        if start + 2 >= CONTEXT:
            return
        self.operate("branch", sequence, branch)
        root = replace(self.token(start, sequence), branches=(branch,))
        self.begin([root, self.token(start + 1, sequence), self.token(start + 1, branch)])
        if len(self.caches[sequence]) == start:  # it was taken back
            self.rewind(branch, 0)
            return
        self.operate("keep", sequence, start, self.draw.draw(st.sampled_from([sequence, branch])), branch)
        self.rewind(sequence, start + self.draw.draw(st.integers(1, 2)))

    def share(self) -> None:
        """A text begins like another one, of which it takes a part."""
        source, target = self.draw.draw(st.permutations(range(TEXTS)))[:2]
        self.operate("branch", source, target)
        self.rewind(target, self.draw.draw(st.integers(0, len(self.caches[source]))))

    def cut(self) -> None:
        sequence = self.draw.draw(st.integers(0, TEXTS - 1))
        held = len(self.caches[sequence])
        self.rewind(sequence, self.draw.draw(st.sampled_from([0, held, held // 2, max(0, held - 1)])))

    def end_all(self) -> None:
        self.finish(0)
        for sequence in range(SEQUENCES):
            self.rewind(sequence, 0)
        assert len(self.log) == 0
        assert self.log.tokens == 0


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([1, 20, 60, 1000]))
def test_what_is_left_gives_what_all_of_it_would(data: st.DataObject, most_tokens: int) -> None:
    world = World(data, most_tokens)
    kinds = [world.decode, world.decode, world.guess, world.share, world.cut, world.cut, world.end_all]
    for _ in range(data.draw(st.integers(1, 25))):
        data.draw(st.sampled_from(kinds))()
        assert carried_out(world.log) == world.caches
        assert world.log.tokens == sum(len(command.batch) for command in world.log if isinstance(command, Decode))


@pytest.mark.parametrize("seed", range(5))
def test_it_stays_as_long_as_what_is_held_though_texts_never_end_together(seed: int) -> None:
    chance, most_tokens = random.Random(seed), 2 * CONTEXT * TEXTS
    log, held = MeshLog(most_tokens), [0] * TEXTS
    for _ in range(3000):
        for sequence in range(TEXTS):
            if held[sequence] == CONTEXT or chance.random() < 0.03:
                held[sequence] = chance.choice([0, 0, held[sequence] // 2])
                log.rewind(sequence, held[sequence])
        batch = Decode(tuple(BatchToken(1, held[sequence], sequence) for sequence in range(TEXTS)))
        held = [length + 1 for length in held]
        log.add(batch, None)
        log.finished(batch, 0.1)
        assert log.tokens + len(log) <= 2 * most_tokens
    caches = carried_out(log)
    assert [len(caches[sequence]) for sequence in range(TEXTS)] == held
