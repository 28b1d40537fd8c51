"""Does one thing again and again, each time with another of its calls failing, in a process under the injector.

    python fault_worker.py SCENARIO FOLDER KIND CALLER ERRNO FIRST STEP MOST

Prints a JSON line for each call that was made to fail: what came of it, and whether what was open was still right
afterwards. The last line says how many calls there are. Whoever started it takes note of a signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge_run.base.errors import EdgeRunError
from edge_run.runtime.llama._ggml import announce_end
from fault_scenarios import SCENARIOS, Scenario
from injector import Injector

MOST_LINE = 1000


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def tell(what: str) -> None:
    os.write(2, f"llama.cpp ended the process: {what}\n".encode())


def _place(error: BaseException) -> str:
    """Return where an error came from, the innermost lines last."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)


@contextmanager
def _noted(found: dict[str, Any]) -> Iterator[None]:
    """Note what ends this block; only errors of ours that are one line are right."""
    try:
        yield
    except EdgeRunError as error:
        message = str(error)
        is_right = bool(message) and "\n" not in message and len(message) < MOST_LINE
        found.update(outcome="refused" if is_right else "unreadable", message=f"{type(error).__name__}: {message}")
    except MemoryError:
        found.update(outcome="out of memory")
    except BaseException as error:
        found.update(outcome="raw", message=f"{error!r:.300} at {_place(error)}")


def attempt(
    injector: Injector, scenario: Scenario, folder: Path, call: tuple[str, str, int, int], right: object
) -> dict[str, Any]:
    """Do `scenario` while `call` fails, and again while none does; return what came of it."""
    found: dict[str, Any] = {"outcome": "went on"}
    with contextlib.ExitStack() as stack:
        work = None
        with _noted(found):
            injector.arm(*call)
            work = stack.enter_context(scenario(folder))
            if work() != right:
                found.update(outcome="WRONG")
        found["calls"], found["failed"] = injector.disarm()
        try:
            work = work or stack.enter_context(scenario(folder))
            found["usable"] = work() == right
        except BaseException as error:
            found["usable"], found["after"] = False, repr(error)[:300]
    return found


def main() -> None:
    """Let each call fail in its turn."""
    name, place, kind, caller, *numbers = sys.argv[1:]
    error, first, step, most = map(int, numbers)
    faulthandler.enable()
    announce_end(tell)
    logging.getLogger("edge_run").setLevel(logging.CRITICAL)
    injector, scenario, folder = Injector(), SCENARIOS[name], Path(place)
    for _ in range(2):
        with scenario(folder) as work:
            right = work()
    for number in range(first, first + step * most, step):
        say(trying=number)
        found = attempt(injector, scenario, folder, (kind, caller, number, error), right)
        if not found["failed"]:
            say(calls=found["calls"])
            return
        say(number=number, **found)


if __name__ == "__main__":
    main()
