"""How long Ollama's clients want a model to stay open."""

from __future__ import annotations

import re

from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.sampling_fields import Name

KeepAlive = float | Name | None
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,9}(?:\.\d{0,9})?)(ns|us|µs|ms|s|m|h|$)")
_DURATION = re.compile(rf"[+-]?(?:{_PART.pattern})+")


def rest_s(given: KeepAlive) -> float | None:
    """Return how long a model stays open when nobody uses it; None: until another one is needed. Raises Refusal.

    As Ollama has it: seconds, or `1h30m`; less than nothing is for ever.
    """
    if not isinstance(given, str):
        return given if given is not None and given >= 0 else None
    if not _DURATION.fullmatch(given):
        raise Refusal(400, "keep_alive: must be a number of seconds, or a duration as 5m", param="keep_alive")
    seconds = sum(float(number) * _UNITS_S[unit or "s"] for number, unit in _PART.findall(given))
    return None if given.startswith("-") else seconds
