"""What the findings of a doctor have in common, whatever they are of."""

from __future__ import annotations

from edge_run.devices.host.findings import OK, Finding


def state(found: Finding | None) -> str:
    assert found is not None
    assert (found.state == OK) <= (found.advice == "")
    assert "\n" not in found.finding + found.advice
    return found.state
