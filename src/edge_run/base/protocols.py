"""The seams between the layers, as protocols. What a layer needs of another is written here, not imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, SupportsIndex, TypeAlias, runtime_checkable

if TYPE_CHECKING:  # what only plans and inspects does without NumPy
    import numpy as np
    import numpy.typing as npt

Logits: TypeAlias = "npt.NDArray[np.float32]"
Clock: TypeAlias = Callable[[], float]  # seconds since some moment: `time.monotonic`, `time.time`, or a test's own


@runtime_checkable
class TokenArray(Protocol):
    """Tokens as an array of NumPy's has them, which is no `Sequence`."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __getitem__(self, place: int, /) -> SupportsIndex:
        """Return one of them."""
        ...


Text: TypeAlias = str | Sequence[int] | TokenArray  # as itself, or as its tokens


@dataclass(frozen=True, slots=True)
class BatchToken:
    """One token of a batch: its id, its position in its sequence, its sequence, and whether its logits are wanted.

    branches: other sequences that it belongs to as well, which must hold the same up to here (`Decoder.branch`).
    """

    token: int
    position: int
    sequence: int = 0
    wants_logits: bool = False
    branches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a decoder can do.

    can_rewind: sequences can be cut at any position (false for recurrent state). can_branch: sequences can share what
    they begin with, and go on differently (also false where attention looks at a window only). outputs_per_pass: tokens
    of a pass whose logits may be asked for. rollback_tokens: where sequences cannot be cut at any position, as many of
    the last pass can be cut, once. ring_tokens: where a token must lie in the cell that it has in a text read in one
    go, and the cells of a sliding window are a ring, its length: what is cut must lie between two multiples of it, as
    llama.cpp goes on from the first of all cells that are free. 0: that does not matter.
    """

    context_tokens: int
    micro_batch_tokens: int
    sequences: int
    vocabulary: int
    can_rewind: bool
    can_branch: bool = False
    outputs_per_pass: int = 1
    rollback_tokens: int = 0
    ring_tokens: int = 0

    def most_guesses(self, position: int) -> int:
        """Return how many tokens have room after the one at `position`, if some of them may be cut again."""
        room = self.context_tokens - position - 1
        return min(room, self.ring_tokens - 1 - position % self.ring_tokens) if self.ring_tokens else room

    def loses_order(self, start: int, stop: int) -> bool:
        """Return whether what follows lies elsewhere than in a text read in one go once `start` to `stop` are cut."""
        return bool(self.ring_tokens) and start // self.ring_tokens < (stop - 1) // self.ring_tokens


class Decoder(Protocol):
    """Tokens in, logits out. Local, speculative and mesh decoders are the same to the generate loop."""

    @property
    def capabilities(self) -> Capabilities:
        """What this decoder can do."""
        ...

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        """Run one batch; return the wanted logits, `(n_wanted, vocabulary)`, in batch order.

        The rows stay valid until the next call. Raises ContextFull, KernelError, TierReadError, or Cancelled;
        after an error no position of this batch is kept (or, where state cannot be cut, the sequence is empty; with a
        batch of several, others may be too). One that is told to keep whole passes may do so after Cancelled. `rewind`
        says where a sequence ends then.
        """
        ...

    def rewind(self, sequence: int, position: int) -> int:
        """Forget `sequence` from `position` on; return the position it now ends at (0 where it cannot be cut)."""
        ...

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        """Let each of `branches` hold what `sequence` holds, and nothing else; nothing is copied."""
        ...

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        """Let `sequence` go on as `branch` does from `position` on, and empty all `branches`."""
        ...


@runtime_checkable
class PassQueue(Protocol):
    """A decoder that can have several batches in flight: they are computed in the order in which they were begun.

    Until all are finished, no two of them may ask for logits of one sequence, none may have branches, and what else the
    decoder is told happens after the batches that were begun before.
    """

    @property
    def most_in_flight(self) -> int:
        """How many batches in flight are of use; it may change from one call to the next."""
        ...

    def begin(self, batch: Sequence[BatchToken]) -> None:
        """Begin a batch of one pass. Raises as `Decoder.decode`; then this batch is not in flight, and others are."""
        ...

    def finish(self) -> Logits:
        """Wait for the batch that was begun first; return its rows, as `Decoder.decode` does.

        Raises as `Decoder.decode`; then no batch is in flight, and the sequences of all are for the caller to cut.
        """
        ...

    def abandon(self) -> None:
        """Take back all batches in flight, if there are any; their sequences are for the caller to cut."""
        ...
