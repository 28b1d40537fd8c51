"""How much slower attention is on keys and values of fewer bits, measured on this device once and kept.

A quantised row is unpacked, or multiplied in integers, for each token that looks at it, so that fewer bytes may take
longer. How much depends on the type and on the width of a pass; that it also depends a little on heads is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_run.base.config import ModelConfig, kv_types
from edge_run.devices.host.machine import OtherLoad, compute_threads
from edge_run.runtime.probing.kept_findings import KeptFindings
from edge_run.runtime.probing.workload import ATTENTION, MANY_TOKENS, OTHERS_SHARE


@dataclass(frozen=True, slots=True)
class AttentionSpeeds:
    """How fast attention is, by the types of keys and values.

    by_type: floating point operations a second in a pass of one token, and in one of many.
    is_disturbed: other programs were at work meanwhile.
    """

    by_type: Mapping[str, tuple[float, float]]
    is_disturbed: bool = False


def attention_speeds(config: ModelConfig, types: Sequence[str], budget_bytes: int) -> AttentionSpeeds:
    """Return the speeds of attention on keys and values of `types`, as `q8_0/q4_0`; measures what is not known.

    Measuring takes about a second for each, and is kept unless it was disturbed.

    budget_bytes: of the run; measuring takes a part of it.
    """
    from edge_run.runtime.probing.kernels import narrow_bytes

    threads = compute_threads(config.threads)
    findings = KeptFindings.of_setup(config.cache / "attention")
    kept, how = findings.read(_kept) or {}, f"{threads} threads, {narrow_bytes(budget_bytes)} bytes"
    alike = kept.get(how, {})
    if all(kind in alike for kind in types):
        return AttentionSpeeds({kind: alike[kind] for kind in types})
    load = OtherLoad()
    found = {
        kind: _measure(kind, threads, budget_bytes) for kind in types
    }  # all, so that they are compared at one time
    is_disturbed = load.share > OTHERS_SHARE
    if not is_disturbed:
        kept[how] = {**alike, **found}
        findings.write(kept)
    return AttentionSpeeds(found, is_disturbed)


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
    has_all = all(min(pair) > 0 for speeds in kept.values() for pair in speeds.values())
    return kept if has_all else {}
