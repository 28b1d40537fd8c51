"""A worker that goes wrong: it hands over what is no number, from its tenth activation on.

python mesh_rogue.py ..., with the words of mesh_worker.py
"""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_run.runtime.mesh.transport import LinkTransport

HONEST_ACTIVATIONS = 10


def main() -> None:
    """Run a worker with activations of this device's own."""
    activations, send = itertools.count(), LinkTransport.send

    def poison(transport: LinkTransport, unit: int, node: str, parts: Sequence[memoryview]) -> None:
        if next(activations) >= HONEST_ACTIVATIONS:
            parts = [memoryview(np.full(part.nbytes // 4, np.nan, np.float32)) for part in parts]
        send(transport, unit, node, parts)

    LinkTransport.send = poison  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).with_name("mesh_worker.py")), run_name="__main__")


if __name__ == "__main__":
    main()
