"""This machine: its memory, disks and processor, what other runs have of it, and what was measured."""
