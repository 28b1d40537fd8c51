"""Earlier tokens whose experts were like the present one's, and what followed them.

What experts a token uses hangs on what token it is, and in what company: tokens that went through the same experts are
often followed by the same. (ExFlow, Yao and others, 2024, section 3, learns such an affinity between layers as a table
of pairs; here the tokens themselves are kept, the latest 128, which needs no table and learns from one occurrence.)
"""

from __future__ import annotations

from collections.abc import Sequence

TOKENS = 128
LIKEST = 8
FADE = 0.8  # of a match, per layer: the last five layers or so say which tokens are alike
FOLLOWING = (0.5, 0.25, 0.25)  # the tokens after a like one, and what their experts count
REFRESH_LOOK_UPS = 4


class Resemblance:
    """The experts of the latest tokens, for `n_layers` layers of `n_experts`, of which a token uses `n_used`.

    weight: what the votes weigh: the squares of how alike the like tokens are, each 0 to 1, added up.
    """

    def __init__(self, n_layers: int, n_experts: int, n_used: int) -> None:
        self._n_used = n_used
        self._chosen: list[list[Sequence[int]]] = [[()] * TOKENS for _ in range(n_layers)]  # by layer and slot
        self._users: list[list[list[int]]] = [[[] for _ in range(n_experts)] for _ in range(n_layers)]  # slots
        self._now = 0  # the slot of the present token; slots go round
        self._known = 0  # tokens before it
        self._likeness = [0.0] * TOKENS
        self._match = 1.0  # grows, instead of every likeness fading
        self._layer = -1
        self._was_prefill = False
        self._batch = 0
        self._age = 0
        self._followers: list[tuple[int, float]] = []
        self.weight = 0.0

    def is_in_prompt(self, layer: int) -> bool:
        """Return whether `layer` comes after those of a batch so far, and so is of the same tokens, if only of one."""
        return self._was_prefill and layer > self._layer

    def note_prompt(self, layer: int, experts: Sequence[int]) -> None:
        """Learn what a batch of tokens used in `layer`, `n_used` each; it may have routed only the last of them."""
        rows = [experts[i : i + self._n_used] for i in range(0, len(experts), self._n_used)][-(TOKENS - 1) :]
        if layer <= self._layer or not self._was_prefill:
            self._now = (self._now + len(rows)) % TOKENS
            self._known = min(self._known + len(rows), TOKENS - 1)
            self._likeness = [0.0] * TOKENS
            self._batch = len(rows)
        for back in range(self._batch):
            self._record(layer, (self._now - back) % TOKENS, rows[-1 - back] if back < len(rows) else ())
        self._layer, self._was_prefill, self._followers, self.weight = layer, True, [], 0.0

    def note(self, layer: int, experts: Sequence[int]) -> None:
        """Learn what the present token uses in `layer`; layers come in order, and the first begins a new token."""
        if layer <= self._layer or self._was_prefill:
            self._begin_token()
        self._layer, self._was_prefill = layer, False
        likeness, match = self._likeness, self._match
        for users in map(self._users[layer].__getitem__, experts):
            for slot in users:
                likeness[slot] += match
        self._match = match / FADE
        self._record(layer, self._now, experts)
        self._age -= 1
        if self._age < 0:
            self._find_followers()

    def vote(self, layer: int, scale: float, chances: list[float]) -> None:
        """Add to `chances`, by expert, the votes for using it in `layer` soon, times `scale`."""
        chosen = self._chosen[layer]
        for slot, weight in self._followers:
            vote = weight * scale
            for expert in chosen[slot]:
                chances[expert] += vote

    def _begin_token(self) -> None:
        self._now = (self._now + 1) % TOKENS
        self._known = min(self._known + 1, TOKENS - 1)
        scale = 1 / self._match  # the token after a like one is the one to compare with
        likeness = self._likeness
        self._likeness = [likeness[-1] * scale, *[value * scale for value in likeness[:-1]]]
        self._likeness[self._now] = 0.0
        self._match = 1.0
        self._age = 0

    def _record(self, layer: int, slot: int, experts: Sequence[int]) -> None:
        chosen, users = self._chosen[layer], self._users[layer]
        for expert in chosen[slot]:
            users[expert].remove(slot)
        chosen[slot] = experts
        for expert in experts:
            users[expert].append(slot)

    def _find_followers(self) -> None:
        """Choose the likest tokens anew, and weigh the tokens after them."""
        self._age = REFRESH_LOOK_UPS - 1
        likeness, now = self._likeness, self._now
        full = self._n_used * self._match * FADE / (1 - FADE)  # of a token that used the same experts all along
        weights: dict[int, float] = {}
        total = 0.0
        for slot in sorted(range(TOKENS), key=likeness.__getitem__)[-LIKEST:]:
            weight = (likeness[slot] / full) ** 2
            distance = (now - slot) % TOKENS
            if not weight or not 1 < distance <= self._known:
                continue
            total += weight
            for after, share in enumerate(FOLLOWING, 1):
                if after < distance:
                    follower = (slot + after) % TOKENS
                    weights[follower] = weights.get(follower, 0.0) + weight * share
        self._followers, self.weight = list(weights.items()), total
