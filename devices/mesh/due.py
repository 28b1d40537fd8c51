"""The work that the state of a mesh leaves for its node."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_run.devices.mesh.orders import InboundOrder
from edge_run.devices.messages.outgoing import Outgoing


@dataclass(slots=True)
class Due:
    """What is to be done.

    outgoing: messages to be sent.
    inbound_orders: orders to be carried out.
    unlinked: nodes whose data link ends for now.
    sent_away: nodes whose data link ends for good.
    is_list_new: the list of members is to be kept.
    is_reconnecting: the connection to the broker is to be made anew.
    """

    outgoing: list[Outgoing] = field(default_factory=list)
    inbound_orders: list[InboundOrder] = field(default_factory=list)
    unlinked: list[str] = field(default_factory=list)
    sent_away: list[str] = field(default_factory=list)
    is_list_new: bool = False
    is_reconnecting: bool = False
