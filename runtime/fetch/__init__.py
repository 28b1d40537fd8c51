"""Models that come from other devices, in pieces that are verified one by one."""
