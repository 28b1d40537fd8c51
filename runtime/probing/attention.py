"""How much slower attention is on keys and values of fewer bits, measured on this device once and kept.

A quantised row is unpacked, or multiplied in integers, for each token that looks at it, so that fewer bytes may take
longer. How much depends on the type and on the width of a pass; that it also depends a little on heads is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_run.base.config import KV_AUTO, KV_TYPES, ModelConfig, kv_types
from edge_run.devices.host.machine import OtherLoad, compute_threads
from edge_run.runtime.probing.kept_findings import KeptFindings
from edge_run.runtime.probing.workload import ATTENTION, MANY_TOKENS, OTHERS_SHARE

PLAIN = "f16"  # the type that others are held against


@dataclass(frozen=True, slots=True)
class AttentionSpeeds:
    """How fast attention is, by the types of keys and values.

    by_type: floating point operations a second in a pass of one token, and in one of many.
    is_disturbed: other programs were at work meanwhile.
    """

    by_type: Mapping[str, tuple[float, float]]
    is_disturbed: bool = False

    def ratio(self, kind: str) -> tuple[float, float]:
        """Return the speeds on keys and values of `kind`, over those on 16 bits."""
        (narrow, wide), (plain_narrow, plain_wide) = self.by_type[kind], self.by_type[PLAIN]
        return narrow / plain_narrow, wide / plain_wide


def attention_speeds(config: ModelConfig, types: Sequence[str], budget_bytes: int) -> AttentionSpeeds:
    """Return the speeds of attention on keys and values of `types`, as `q8_0/q4_0`; measures what is not known.

    Measuring takes about a second for each, and is kept unless it was disturbed.

    budget_bytes: of the run; measuring takes a part of it.
    """
    from edge_run.runtime.probing.kernels import narrow_bytes

    threads = compute_threads(config.threads)
    findings = _findings(config)
    kept, how = findings.read(_kept) or {}, f"{_started(threads)}{narrow_bytes(budget_bytes)} bytes"
    alike = kept.get(how, {})
    if all(kind in alike for kind in types):
        return AttentionSpeeds({kind: alike[kind] for kind in types})
    load = OtherLoad()
    found = {
        kind: _measure(kind, threads, budget_bytes) for kind in dict.fromkeys((*types, *alike))
    }  # all, so that they are compared at one time
    is_disturbed = load.share > OTHERS_SHARE
    if not is_disturbed:
        findings.write({**{name: kept[name] for name in kept if name != how}, how: found})  # the latest is the last
    return AttentionSpeeds(found, is_disturbed)


def known_ratio(config: ModelConfig) -> tuple[float, float] | None:
    """Return how fast narrow and wide passes look at keys and values of the type in `config`, over those of 16 bits.

    None where that was not measured, and where it says nothing: for 16 bits, or without flash attention. Quick.
    """
    if not _is_measurable(config):
        return None
    kept, started = _findings(config).read(_kept) or {}, _started(compute_threads(config.threads))
    alike = [
        found for how, found in kept.items() if how.startswith(started) and {PLAIN, config.kv_type} <= found.keys()
    ]
    return AttentionSpeeds(alike[-1]).ratio(config.kv_type) if alike else None


def is_ratio_missing(config: ModelConfig) -> bool:
    """Return whether `known_ratio` would say something if it was measured."""
    return _is_measurable(config) and known_ratio(config) is None


def _is_measurable(config: ModelConfig) -> bool:
    return config.kv_type not in (PLAIN, KV_AUTO) and config.flash_attention != "off"


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
    """Return what was kept, by how it was measured; nothing of what is not as it should be."""
    kept = {
        str(how): {str(kind): (float(narrow), float(wide)) for kind, (narrow, wide) in speeds.items()}
        for how, speeds in found.items()
    }
    has_all = all(
        min(pair) > 0 and {*kv_types(kind)} <= {*KV_TYPES} for speeds in kept.values() for kind, pair in speeds.items()
    )
    return kept if has_all else {}
