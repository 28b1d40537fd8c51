"""How long members of a mesh wait for each other where a test is about something else: a busy machine delays them.

Threads that say that a device is there may be held up for a second or two, and it would be given up. How long a silence
may be has tests of its own, with a clock that these drive.
"""

from __future__ import annotations

from edge_run.devices.presence.membership import QUICK, HeartbeatTiming

PATIENT = HeartbeatTiming(QUICK.heartbeat_s, 20.0)  # in place of `membership.QUICK`
LONG_SILENCE_S = 10.0  # in place of `connection.SILENCE_S`, of who connects
