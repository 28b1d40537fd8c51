"""Padding tokens: passes over sequences with cells of their own have as many tokens of one as of another. Pure.

llama.cpp computes sequences with cells of their own together only where they have as many tokens, and where their
numbers follow each other. So those between them get padding tokens too. Exact passes have at least two of each, and two
rows of logits if any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from edge_run.base.protocols import BatchToken

LEAST_TOKENS = 2  # of a sequence, in an exact pass, and of those that have logits


def padded_width(lengths: Sequence[int], n_sequences: int, least: int = LEAST_TOKENS) -> int:
    """Return the tokens of a pass over sequences in a row of which some have tokens of their own, `lengths`."""
    return n_sequences * max(least, *lengths)


def padded(
    tokens: Sequence[BatchToken], held: Sequence[int], least: int = LEAST_TOKENS
) -> tuple[list[BatchToken], dict[int, int]]:
    """Return the tokens of a pass with padding tokens among them, and from where on each padded sequence is cut then.

    tokens: of sequences in their order, those of each in a row. held: how many tokens each sequence has. least: of a
    sequence.
    """
    own = _by_sequence(tokens)
    length = max(least, *map(len, own.values()))
    line: list[BatchToken] = []
    cuts: dict[int, int] = {}
    for sequence in range(tokens[0].sequence, tokens[-1].sequence + 1):
        mine = own.get(sequence, [])
        end = mine[-1].position + 1 if mine else held[sequence]
        n_more = length - len(mine)
        line += [*mine, *(BatchToken(tokens[0].token, end + i, sequence) for i in range(n_more))]
        if n_more:
            cuts[sequence] = end
    return line, cuts


def padded_passes(
    batch: Sequence[BatchToken], most_tokens: int, least: int = LEAST_TOKENS
) -> Iterator[list[BatchToken]]:
    """Return the tokens of each pass over some sequences of `batch`, which has `most_tokens` with padding at most."""
    taken: list[BatchToken] = []
    lengths: list[int] = []
    for sequence, mine in _by_sequence(batch).items():
        if taken:
            assert sequence > taken[-1].sequence, "sequences are in their order"
            n_sequences = sequence - taken[0].sequence + 1
            if padded_width([*lengths, len(mine)], n_sequences, least) > most_tokens:
                yield taken
                taken, lengths = [], []
        taken = [*taken, *mine]
        lengths.append(len(mine))
    yield taken


def with_another_output(tokens: Sequence[BatchToken]) -> list[BatchToken]:
    """Return the tokens of a pass, of several tokens, so that the logits of one more are computed."""
    other = next(i for i, token in enumerate(tokens) if not token.wants_logits)
    return [*tokens[:other], replace(tokens[other], wants_logits=True), *tokens[other + 1 :]]


def _by_sequence(tokens: Sequence[BatchToken]) -> dict[int, list[BatchToken]]:
    found: dict[int, list[BatchToken]] = {}
    for token in tokens:
        found.setdefault(token.sequence, []).append(token)
    return found
