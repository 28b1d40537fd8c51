"""A worker that goes wrong: it hands over what is no number, from its tenth state on.

python mesh_rogue.py python mesh_worker.py ...
"""

from __future__ import annotations

import itertools
import runpy
import sys
from collections.abc import Sequence

import numpy as np

from edge_run.runtime.mesh.transport import LinkWire

HONEST_STATES = 10


def main() -> None:
    """Run the worker that is named, with states of this device's own."""
    states, send = itertools.count(), LinkWire.send

    def poison(wire: LinkWire, unit: int, node: str, parts: Sequence[memoryview]) -> None:
        if next(states) >= HONEST_STATES:
            parts = [memoryview(np.full(part.nbytes // 4, np.nan, np.float32)) for part in parts]
        send(wire, unit, node, parts)

    LinkWire.send = poison  # type: ignore[method-assign]
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
