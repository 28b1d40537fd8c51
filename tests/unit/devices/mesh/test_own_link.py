"""When it is looked up where others reach this device, and when that is announced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edge_run.base.fields import Document
from edge_run.devices.mesh.own_link import LOOK_S, OwnLink


def test_a_new_address_is_announced_once_within_a_minute_or_at_once_when_connected_anew() -> None:
    now_s, places, said = [0.0], [], list[object]()
    state: Any = SimpleNamespace(capabilities={}, link={"places": []})
    state.describe = lambda capabilities, link: state.__dict__.update(link=link)
    state.announce = lambda: said.append(state.link["places"])

    def find() -> Document:
        if places == ["no files are left"]:
            raise OSError
        return {"places": list(places)}

    link = OwnLink(find, lambda: now_s[0])
    for place in ("one", "two"):
        link.tell(state)
        places[:] = [place]
        link.tell(state)
        now_s[0] += LOOK_S
    assert said == [["one"]]
    link.tell(state)
    link.tell(state)
    assert said == [["one"], ["two"]]
    places[:] = ["no files are left"]
    link.look_soon()
    link.tell(state)
    places[:] = ["three"]
    link.look_soon()
    link.tell(state)
    assert said == [["one"], ["two"], ["three"]]
