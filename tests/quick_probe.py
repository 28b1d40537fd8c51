"""A measurement of a disk that takes no time, and tells little."""

from edge_run.base.units import MIB
from edge_run.devices.host.disk import Effort

QUICK = Effort(
    duration_s=0.02,
    skip_s=0.005,
    most_bytes=32 * MIB,
    ring_bytes=16 * MIB,
    fresh_bytes=64 * MIB,
    scratch_bytes=32 * MIB,
)
