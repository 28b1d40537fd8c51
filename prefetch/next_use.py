"""The policy that keeps the experts whose next use is expected the soonest.

Layers are computed in a cycle, so an expert is used the next time that its layer computes with a probability p, else a
cycle later with probability p again. Counted in look-ups, its next use is expected at the layer's next look-up + cycle
* (1 - p) / p. The one whose next use is expected the latest is evicted first, and a newcomer is kept only if it is
expected before that. p is the mean of two estimates: of frequencies that forget at three rates, and of the experts that
followed earlier tokens like the present one. In a prefill batch, any of many tokens may use an expert: then nearly all
are used, and the one used last is evicted first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edge_run.prefetch.experts import LayerExpert, MoeShape, Policy
from edge_run.prefetch.resemblance import Resemblance

HALF_LIVES_TOKENS = (128, 16, 1)
PROMPT_TOKEN = 0.2  # what a token of a prompt counts: an answer is not its prompt
FORECAST_SHARE = 0.5  # of like tokens in p
DOUBT = 0.1  # the weight of like tokens at which they are believed half
PROMPT_TOKENS = 256  # of a prompt, the last ones
_FADES = tuple(0.5 ** (1 / half_life) for half_life in HALF_LIVES_TOKENS)
_RESCALE_TOKENS = 500  # before 2 ** tokens, of the shortest half-life, overflows
_LEAST_CHANCE = 1e-9


class Frequencies:
    """How often a layer used each of `n_experts` experts recently: a use counts half as much after each half-life."""

    def __init__(self, n_experts: int, n_used: int) -> None:
        self._prior = min(1.0, n_used / n_experts)
        self._counts = [[0.0] * n_experts for _ in HALF_LIVES_TOKENS]
        self._weights = [1.0] * len(HALF_LIVES_TOKENS)  # of a use; they grow, instead of all counts falling
        self._tokens = [0.0] * len(HALF_LIVES_TOKENS)
        self._noted = 0

    def note(self, experts: Sequence[int], token: float = 1.0) -> None:
        """Count what a token used; the token counts `token`."""
        self._noted += 1
        if self._noted % _RESCALE_TOKENS == 0:
            self._rescale()
        for i, fade in enumerate(_FADES):
            self._tokens[i] = self._tokens[i] * fade + token
            weight = self._weights[i] = self._weights[i] / fade
            counts, use = self._counts[i], weight * token
            for expert in experts:
                counts[expert] += use

    def chances(self, experts: Collection[int], scale: float, others: Sequence[float]) -> list[tuple[float, int]]:
        """Return, for each of `experts`, the mean of its frequencies times `scale`, plus its value in `others`."""
        slow, medium, fast = self._counts
        scale /= len(HALF_LIVES_TOKENS)
        totals = [scale / (tokens + 1) for tokens in self._tokens]
        a, b, c = (total / weight for total, weight in zip(totals, self._weights, strict=True))
        prior = self._prior * sum(totals)
        return [(prior + a * slow[e] + b * medium[e] + c * fast[e] + others[e], e) for e in experts]

    def _rescale(self) -> None:
        self._counts = [
            [count / weight for count in counts] for counts, weight in zip(self._counts, self._weights, strict=True)
        ]
        self._weights = [1.0] * len(self._weights)


class NextUsePolicy(Policy):
    """Evicts the expert, of all layers, whose next use is expected the latest."""

    def __init__(self, moe: MoeShape) -> None:
        n_layers = len(moe.layers)
        self._layers = moe.layers
        self._places = {layer: place for place, layer in enumerate(moe.layers)}
        self._n_experts, self._n_used = moe.experts, moe.used
        self._frequencies = [Frequencies(moe.experts, moe.used) for _ in moe.layers]
        self._resemblance = Resemblance(n_layers, moe.experts, moe.used)
        self._looked_up = [0] * n_layers  # when the layer was looked up last
        self._ranks: list[list[tuple[float, int]]] = [[] for _ in moe.layers]  # (p, expert), the least p last
        self._last_use = [0.0] * n_layers  # when the last of these is expected; 0 for none
        self._clock = 0
        self._place = 0
        self._next_tokens = [1] * n_layers  # of the layer's next look-up
        self._noted: dict[int, float] = {}  # the experts looked up last, and their p
        self._held: list[tuple[float, int]] = []  # those of them that are resident

    def note(self, layer: int, experts: Sequence[int], resident: Collection[int], next_tokens: int) -> None:
        """Learn from a look-up, and rank the resident experts of `layer`."""
        self._rank(self._place, self._ranks[self._place] + self._held)
        self._clock += 1
        place = self._place = self._places[layer]
        self._looked_up[place], self._next_tokens[place] = self._clock, next_tokens
        share, others = self._learn(place, experts)
        frequencies = self._frequencies[place]
        noted = frequencies.chances(dict.fromkeys(experts), share, others)
        self._noted = {expert: chance for chance, expert in noted}
        self._held = [entry for entry in noted if entry[1] in resident]
        rest = [expert for expert in resident if expert not in self._noted]
        self._rank(place, frequencies.chances(rest, share, others))

    def ranked(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Return the likeliest first."""
        return sorted(experts, key=self._noted.__getitem__, reverse=True)

    def expect(self, layer: int, experts: Collection[int]) -> None:
        """Take it as certain that `layer` uses `experts` next time."""
        place = self._places[layer]
        if place != self._place:
            self._rank(place, [(1.0 if e in experts else chance, e) for chance, e in self._ranks[place]])

    def victim(self, newcomer: LayerExpert | None, is_prefetch: bool = False) -> LayerExpert | None:
        """Return the expert whose next use is expected the latest; None where the newcomer's is later still."""
        last_use = self._last_use
        if is_prefetch:
            last_use = last_use.copy()
            last_use[self._place] = 0.0
        latest = max(last_use)
        place = last_use.index(latest)
        if not latest or (newcomer is not None and latest <= self._expected(newcomer, is_prefetch)):
            return None
        _, number = self._ranks[place].pop()
        self._set_last_use(place)
        return self._layers[place], number

    def add(self, expert: LayerExpert, is_prefetch: bool = False) -> None:
        """Take `expert` as resident; a prefetched one is taken to be used the next time that its layer computes."""
        place, number = self._places[expert[0]], expert[1]
        if place == self._place and number in self._noted:
            self._held.append((self._noted[number], number))
        else:
            self._ranks[place].insert(0, (1.0, number))
            self._set_last_use(place)

    def remove(self, expert: LayerExpert) -> None:
        """Forget `expert` as resident."""
        place, number = self._places[expert[0]], expert[1]
        if place == self._place:
            self._held = [entry for entry in self._held if entry[1] != number]
        self._ranks[place] = [entry for entry in self._ranks[place] if entry[1] != number]
        self._set_last_use(place)

    def _learn(self, place: int, experts: Sequence[int]) -> tuple[float, list[float]]:
        """Count `experts`; return the weight of frequencies in p, and the part of similar tokens for each expert."""
        others = [0.0] * self._n_experts
        frequencies, resemblance = self._frequencies[place], self._resemblance
        if len(experts) > self._n_used or resemblance.is_in_prompt(place):
            for i in range(max(0, len(experts) - PROMPT_TOKENS * self._n_used), len(experts), self._n_used):
                frequencies.note(experts[i : i + self._n_used], PROMPT_TOKEN)
            resemblance.note_prompt(place, experts)
            return 1.0, others
        frequencies.note(experts)
        resemblance.note(place, experts)
        trust = FORECAST_SHARE / (resemblance.weight + DOUBT)
        resemblance.vote(place, trust, others)
        return 1.0 - trust * resemblance.weight, others

    def _expected(self, expert: LayerExpert, is_prefetch: bool) -> float:
        """Return when `expert` is expected to be used, less one cycle, as all times here."""
        chance = 1.0 if is_prefetch else self._noted[expert[1]]
        return self._next_use(self._places[expert[0]], chance)

    def _next_use(self, place: int, chance: float) -> float:
        """Return when an expert that a token uses with probability `chance` is expected to be used, less one cycle."""
        if (tokens := self._next_tokens[place]) > 1:
            chance = 1 - max(0.0, 1 - chance) ** tokens
        return self._looked_up[place] + len(self._layers) / max(chance, _LEAST_CHANCE)

    def _rank(self, place: int, entries: list[tuple[float, int]]) -> None:
        entries.sort(reverse=True)
        self._ranks[place] = entries
        self._set_last_use(place)

    def _set_last_use(self, place: int) -> None:
        ranks = self._ranks[place]
        self._last_use[place] = self._next_use(place, ranks[-1][0]) if ranks else 0.0
