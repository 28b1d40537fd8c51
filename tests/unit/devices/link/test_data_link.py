"""What the data link keeps of its peers, without any; with real ones in tests/integration/test_link.py."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from edge_run.base.mesh import LinkRate
from edge_run.devices.link.connection import Peer
from edge_run.devices.link.data_link import DataLink


def test_what_was_measured_at_an_address_is_forgotten_with_it() -> None:
    """Else a run takes a device for reached that is not, as long as what was measured at the old address is fresh."""
    moving, staying = (Peer(node, "1", node, ("tcp://127.0.0.1:1025",)) for node in ("moving", "staying"))
    with contextlib.closing(DataLink()) as link:
        link.set_peers({one.node: one for one in (moving, staying)})
        link._service.rates |= dict.fromkeys(("moving", "staying"), LinkRate("", 0.001, 1e8))
        link.set_peers({one.node: one for one in (replace(moving, places=("tcp://127.0.0.1:1026",)), staying)})
        assert link.rates().keys() == {"staying"}


def test_who_is_a_member_again_is_not_cut_off_any_more() -> None:
    """Two changes to the list at once, of which the removal is dropped."""
    one = Peer("one", "1", "key", ("tcp://127.0.0.1:1025",))
    with contextlib.closing(DataLink()) as link:
        link.set_peers({one.node: one})
        for node in ("one", "two"):
            link.send_away(node)
        link.set_peers({})
        assert link._service.sent_away == {"one", "two"}
        link.set_peers({one.node: one})
        assert link._service.sent_away == {"two"}
        link.send_away("one")
        link.set_peers({one.node: one})
        assert link._service.sent_away == {"two"}, "also where it came back before anybody saw it gone"
