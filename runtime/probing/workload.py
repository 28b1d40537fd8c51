"""What is measured of a processor and of a GPU alike, on what, when, and when a figure counts as disturbed."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from edge_run.devices.host.machine import cpu_name, usable_cores
from edge_run.devices.host.profile import MeasuredSetup, utc_now
from edge_run.runtime.llama.library import library_build


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of `heads` heads of `head_elements` on `kv_tokens` keys and values, which have `kv_heads` heads."""

    kv_tokens: int
    head_elements: int
    heads: int
    kv_heads: int


ATTENTION = AttentionShape(kv_tokens=1024, head_elements=128, heads=32, kv_heads=8)
MANY_TOKENS = 512
OTHERS_SHARE = 0.1  # of the cores: from here on what was measured is the device at work for others too

Multiplication = tuple[str, int, int, bool]  # type, row length, tokens, by expert


def measured_now() -> str:
    """Return the time for a figure that has just been measured."""
    return utc_now().isoformat(timespec="seconds")


def this_setup() -> MeasuredSetup:
    """Return what the figures of this device depend on, and what is decided by them."""
    cores = usable_cores()
    return MeasuredSetup(cpu_name(), platform.machine(), cores.logical, cores.quota, library_build())
