"""How much slower attention is on keys and values of fewer bits, measured on this device once and kept.

A quantised row is unpacked, or multiplied in integers, for each token that looks at it, so that fewer bytes may take
longer. How much depends on the type and on the width of a pass; that it also depends a little on heads is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from edge_run.base.config import KV_TYPES, ModelConfig, kv_types
from edge_run.devices.host.machine import OtherLoad, compute_threads
from edge_run.devices.host.profile import CLOCK_ERROR, DISTURBED_LIFETIME, utc_now
from edge_run.runtime.probing.kept_findings import KeptFindings
from edge_run.runtime.probing.workload import ATTENTION, MANY_TOKENS, OTHERS_SHARE, measured_now

PLAIN = "f16"  # the type that others are held against
_Speeds = Mapping[str, tuple[float, float]]  # by type, in narrow and in wide passes
_DISTURBED = ", disturbed at "  # and the time, in the name of what was measured while other programs were at work


@dataclass(frozen=True, slots=True)
class AttentionRatio:
    """How fast attention is in narrow and in wide passes, over that on 16 bits.

    is_disturbed: other programs were at work while it was measured.
    """

    narrow: float
    wide: float
    is_disturbed: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpeeds:
    """How fast attention is, by the types of keys and values.

    by_type: floating point operations a second in a pass of one token, and in one of many.
    is_disturbed: other programs were at work meanwhile.
    """

    by_type: Mapping[str, tuple[float, float]]
    is_disturbed: bool = False

    def ratio(self, kind: str) -> AttentionRatio:
        """Return the speeds on keys and values of `kind`, over those on 16 bits."""
        (narrow, wide), (plain_narrow, plain_wide) = self.by_type[kind], self.by_type[PLAIN]
        return AttentionRatio(narrow / plain_narrow, wide / plain_wide, self.is_disturbed)


def attention_speeds(config: ModelConfig, types: Sequence[str], budget_bytes: int) -> AttentionSpeeds:
    """Return the speeds of attention on keys and values of `types`, as `q8_0/q4_0`; measures what is not known.

    Measuring takes about a second for each. It is kept, for ten minutes only where it was disturbed.

    budget_bytes: of the run; measuring takes a part of it.
    """
    if known := known_speeds(config, types, budget_bytes):
        return known
    threads = compute_threads(config.threads)
    findings, how = _findings(config), _measured_as(threads, budget_bytes)
    kept = findings.read(_kept) or {}
    alike = _alike(kept, how)
    before = [kind for speeds in alike.values() for kind in speeds]
    load = OtherLoad()
    found = {
        kind: _measure(kind, threads, budget_bytes) for kind in dict.fromkeys((*types, *before))
    }  # all, so that they are compared at one time
    is_disturbed = load.share > OTHERS_SHARE
    name = f"{how}{_DISTURBED}{measured_now()}" if is_disturbed else how
    others = {other: kept[other] for other in kept if other not in alike or (is_disturbed and other == how)}
    findings.write({**others, name: found})  # the latest is the last
    return AttentionSpeeds(found, is_disturbed)


def known_speeds(config: ModelConfig, types: Sequence[str], budget_bytes: int) -> AttentionSpeeds | None:
    """Return the same where all of it was measured; else None."""
    how = _measured_as(compute_threads(config.threads), budget_bytes)
    for name, speeds in _alike(_findings(config).read(_kept) or {}, how).items():  # what was not disturbed first
        if all(kind in speeds for kind in types):
            return AttentionSpeeds({kind: speeds[kind] for kind in types}, name != how)
    return None


def _measured_as(threads: int, budget_bytes: int) -> str:
    """Return the name of what is measured with so many threads, in a part of a budget."""
    from edge_run.runtime.probing.kernels import narrow_bytes

    return f"{_started(threads)}{narrow_bytes(budget_bytes)} bytes"


def _alike(kept: Mapping[str, _Speeds], how: str) -> dict[str, _Speeds]:
    """Return what of `kept` was measured so, disturbed or not."""
    return {name: kept[name] for name in (how, *kept) if name in kept and name.partition(_DISTURBED)[0] == how}


def kind_of_keys(config: ModelConfig) -> str:
    """Return the types of keys and values of `config`, in one word where they are the same."""
    k, v = config.kv_types
    return k if k == v else f"{k}/{v}"


def known_ratio(config: ModelConfig) -> AttentionRatio | None:
    """Return how fast passes look at keys and values of the type in `config`.

    None where that was not measured, and where it says nothing: for 16 bits, or without flash attention. Quick.
    """
    if not _is_measurable(config):
        return None
    kind, started = kind_of_keys(config), _started(compute_threads(config.threads))
    kept = _findings(config).read(_kept) or {}
    alike = [
        AttentionSpeeds(found, _DISTURBED in how)
        for how, found in kept.items()
        if how.startswith(started) and {PLAIN, kind} <= found.keys()
    ]
    alike.sort(key=lambda found: not found.is_disturbed)
    return alike[-1].ratio(kind) if alike else None


def is_ratio_missing(config: ModelConfig) -> bool:
    """Return whether `known_ratio` would say something if it was measured."""
    return _is_measurable(config) and known_ratio(config) is None


def _is_measurable(config: ModelConfig) -> bool:
    return kind_of_keys(config) != PLAIN and config.flash_attention != "off"


def _findings(config: ModelConfig) -> KeptFindings:
    return KeptFindings.of_setup(config.cache / "attention")


def _started(threads: int) -> str:
    """Return what begins the name of all that was measured with so many threads."""
    return f"{threads} threads, "


def _measure(kind: str, threads: int, budget_bytes: int) -> tuple[float, float]:
    from edge_run.runtime.probing.kernels import measure_attention

    narrow, wide = (
        measure_attention(tokens, ATTENTION, threads=threads, types=kv_types(kind), budget_bytes=budget_bytes)
        for tokens in (1, MANY_TOKENS)
    )
    return narrow, wide


def _kept(found: Any) -> dict[str, dict[str, tuple[float, float]]]:
    """Return what was kept and counts now, by how it was measured; nothing of what is not as it should be."""
    kept = {
        str(how): {str(kind): (float(narrow), float(wide)) for kind, (narrow, wide) in speeds.items()}
        for how, speeds in found.items()
        if _counts(how)
    }
    has_all = all(
        min(pair) > 0 and {*kv_types(kind)} <= {*KV_TYPES} for speeds in kept.values() for kind, pair in speeds.items()
    )
    return kept if has_all else {}


def _counts(how: str) -> bool:
    """Return whether what was measured so was not disturbed, or a few minutes ago."""
    _, is_disturbed, measured_at = how.partition(_DISTURBED)
    return not is_disturbed or -CLOCK_ERROR <= utc_now() - datetime.fromisoformat(measured_at) <= DISTURBED_LIFETIME
