"""Carries out a command on a slice, on the device that gives the command and on those that obey it."""

from __future__ import annotations

from edge_run.runtime.decoding.driver import PassShape
from edge_run.runtime.mesh.messages import Command, Decode
from edge_run.runtime.slices.engine import SliceEngine


def carry_out(engine: SliceEngine, command: Command) -> None:
    """Do what the coordinator does too. Raises ConfigError, ContextFull for what the open context cannot do."""
    decoder = engine.decoder
    if isinstance(command, Decode):
        decoder.follow(command.batch)
        return
    numbers = command.numbers
    if command.what == "clear":
        decoder.clear()
    elif command.what == "rewind":
        decoder.rewind(numbers[0], numbers[1])
    elif command.what == "branch":
        decoder.branch(numbers[0], numbers[1:])
    elif command.what == "keep":
        decoder.keep(numbers[0], numbers[1], numbers[2], numbers[3:])
    elif command.what == "learn":
        engine.learn(PassShape(*numbers))
