"""`mesh status` shows whatever members say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from edge_run.base.mesh import Member
from edge_run.base.mesh_status import MeshStatus
from edge_run.cli.mesh.status import describe
from edge_run.devices.mesh.watch import _member

HUGE = 10**4000


@pytest.mark.parametrize("wild", [HUGE, -HUGE, float("nan"), float("inf"), 1e300, True, None, "x", [HUGE], {"x": HUGE}])
def test_what_cannot_be_is_shown_in_few_letters_or_left_out(wild: Any) -> None:
    link = {"round_trip_s": wild, "bytes_per_s": wild, "place": "tcp://127.0.0.1:1"}
    load = {"links": {"b": link, "c": wild}, "tokens_per_s": wild}
    member = Member("b", "B", "incarnation", {"memory_bytes": wild, "models": wild})
    shown = _member(member, "b", {"layers": {"b": [[wild, wild], [0, 3], wild]}}, load)
    text = describe(MeshStatus("id", "mqtt://x", "b", 1, {"model": "m"}, (shown,)))
    assert len(text) < 1000
    assert shown.layers == ((0, 2),)
    assert shown.links == ()


def test_what_can_be_is_shown() -> None:
    link = {"round_trip_s": 0.001, "bytes_per_s": 1e6, "place": "tcp://127.0.0.1:1"}
    shown = _member(
        Member("b", "B", "incarnation", {"memory_bytes": 1 << 30}), "", {}, {"links": {"c": link}, "busy": 0.5}
    )
    text = describe(MeshStatus("id", "mqtt://x", "", 1, {}, (shown,)))
    assert "memory 1.00 GiB" in text
    assert "1.00 ms" in text
    assert "busy 0.5" in text
