"""Decides which pieces are asked of which device: a state machine without I/O.

Each provider has a window of pieces that were asked for and have not come. The window grows while pieces come quickly
and shrinks while they do not, so that the link is used and never clogged. All windows together are less than what may
wait here to be stored. A provider that fails is asked no more, and its pieces are asked of the others. One that has
sent pieces before and is silent now is asked once more, since what it sent may have been dropped here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

MOST_WINDOW, MOST_TOGETHER = 16, 48
QUICK_S, SLOW_S = 0.15, 0.5
TIMEOUT_S = 20.0


class _Provider:
    """A node that has the model.

    asked: when it was asked for which pieces that have not come.
    has_sent: something, since it was silent for so long that it would have failed.
    """

    def __init__(self) -> None:
        self.window, self.has_sent = 1, False
        self.asked: dict[int, float] = {}


class Fetching:
    """The pieces `wanted`, and the nodes that have them. Not thread-safe.

    failures: why a node is asked no more.
    """

    def __init__(self, wanted: Iterable[int], providers: Sequence[str]) -> None:
        self._waiting = deque(wanted)
        self._providers = {node: _Provider() for node in providers}
        self.failures: dict[str, str] = {}

    @property
    def is_done(self) -> bool:
        """Whether all has come."""
        return not self._waiting and not any(provider.asked for provider in self._providers.values())

    @property
    def is_stuck(self) -> bool:
        """Whether the rest will not come: nobody is left who has it. `failures` says why, for each node."""
        return not self._providers and not self.is_done

    def next(self, now_s: float) -> list[tuple[str, int]]:
        """Return what to ask for now, as (node, piece); the least busy are asked first."""
        for node, provider in list(self._providers.items()):
            if any(now_s - asked_s > TIMEOUT_S for asked_s in provider.asked.values()):
                self._doubt(node, provider)
        requests: list[tuple[str, int]] = []
        room = MOST_TOGETHER - sum(len(provider.asked) for provider in self._providers.values())
        while self._waiting and len(requests) < room:
            idlest = min(self._providers, key=self._busyness, default=None)
            if idlest is None or self._busyness(idlest) >= 1:
                break
            piece = self._waiting.popleft()
            self._providers[idlest].asked[piece] = now_s
            requests.append((idlest, piece))
        return requests

    def was_asked(self, node: str, piece: int) -> bool:
        """Return whether `piece` is awaited from `node`."""
        return node in self._providers and piece in self._providers[node].asked

    def came(self, node: str, piece: int, now_s: float) -> None:
        """`piece`, which was asked of `node`, has come, and is as it should be."""
        provider = self._providers[node]
        took_s, provider.has_sent = now_s - provider.asked.pop(piece), True
        if took_s <= QUICK_S:
            provider.window = min(MOST_WINDOW, provider.window + 1)
        elif took_s > SLOW_S:
            provider.window = max(1, provider.window // 2)

    def fail(self, node: str, why: str) -> None:
        """`node` is asked no more. Nothing happens where it is not asked anyway."""
        provider = self._providers.pop(node, None)
        if provider is not None:
            self.failures[node] = why
            self._take_back(provider)

    def _doubt(self, node: str, provider: _Provider) -> None:
        """`node` did not send in time: what it was asked for is asked again, of it too where it has sent before."""
        if not provider.has_sent:
            self.fail(node, f"did not send in {TIMEOUT_S:.0f} s")
            return
        provider.has_sent, provider.window = False, 1
        self._take_back(provider)

    def _take_back(self, provider: _Provider) -> None:
        """Have what a provider was asked for wait again, before all else."""
        self._waiting.extendleft(sorted(provider.asked, reverse=True))
        provider.asked.clear()

    def check(self) -> None:
        """Assert what always holds."""
        asked = [piece for provider in self._providers.values() for piece in provider.asked]
        assert len({*asked, *self._waiting}) == len(asked) + len(self._waiting), "a piece is asked for twice"
        assert not self._providers.keys() & self.failures.keys()
        assert all(len(provider.asked) <= MOST_WINDOW for provider in self._providers.values())
        assert len(asked) <= MOST_TOGETHER

    def _busyness(self, node: str) -> float:
        provider = self._providers[node]
        return len(provider.asked) / provider.window
