"""The commands of `edge-run split`."""
