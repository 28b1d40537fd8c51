"""The commands of `edge-run mesh`."""
