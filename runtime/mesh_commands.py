"""What a command does to a slice: the same on the device that gives it and on those that obey."""

from __future__ import annotations

from edge_run.base.errors import ProtocolError
from edge_run.runtime.driver import PassShape
from edge_run.runtime.mesh_messages import Command, Decode
from edge_run.runtime.slice_engine import SliceEngine


def carry_out(engine: SliceEngine, command: Command) -> None:
    """Do what the coordinator does too."""
    decoder = engine.decoder
    if isinstance(command, Decode):
        decoder.decode(command.batch)
        return
    numbers = command.numbers
    try:
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
    except (IndexError, TypeError) as error:
        raise ProtocolError(f"a command {command.what} with numbers {numbers}: too few, or too many") from error
