"""What `edge-run replay` reports: how often each policy would have had an expert in memory, under each budget."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PolicyReplay:
    """One policy under one budget. policy: its name, or `optimum`. look_ups: experts of decoded tokens.

    hits: those of them that were in memory; hit_rate: as a share. bytes_read: for the others. bypassed: experts that
    were read and not kept.
    """

    policy: str
    budget_bytes: int
    look_ups: int
    hits: int
    hit_rate: float
    bytes_read: int
    bytes_per_token: float
    bypassed: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace, and what came of it. experts: of a layer; experts_per_token: of those, the most that a token used.

    expert_bytes: of all experts of all layers. prompts: batches that warmed the cache.
    """

    trace: str
    model: str
    layers: int
    experts: int
    experts_per_token: int
    expert_bytes: int
    prompts: int
    decoded_tokens: int
    replays: tuple[PolicyReplay, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies' names."""
        return tuple(dict.fromkeys(one.policy for one in self.replays))

    @property
    def budgets_bytes(self) -> tuple[int, ...]:
        """The budgets."""
        return tuple(dict.fromkeys(one.budget_bytes for one in self.replays))

    def of(self, policy: str, budget_bytes: int) -> PolicyReplay:
        """Return what came of this policy under this budget. Raises ConfigError where it was not replayed."""
        for one in self.replays:
            if (one.policy, one.budget_bytes) == (policy, budget_bytes):
                return one
        known = f"{', '.join(self.policies)} under {', '.join(map(str, self.budgets_bytes))} bytes"
        raise ConfigError(f"policy {policy!r} under {budget_bytes!r} bytes: was not replayed; there are {known}")


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace that was written. layers: with experts; experts: in each of them."""

    trace: str
    layers: int
    experts: int
    prompt_tokens: int
    decoded_tokens: int
