"""The bundled model, what tests ask it, and the options under which its grown copy (the fixture `grown`) streams."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

from edge_run.base.units import MIB
from edge_run.devices.host.memory import process_memory

KIT = Path(__file__).resolve().parents[1] / "src" / "edge_run" / "models" / "kit-dense-q4_0.gguf"
PROMPT = "It was a dark evening, and"
GREEDY = ("--temp", "0", "-c", "256")


def streamed() -> dict[str, Any]:
    """Return options that leave about half of the grown model's 120 MB, whatever the test process holds already.

    What earlier tests left behind is freed first: freed later, it would make room for all of the model.
    """
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    memory = process_memory().resident_bytes + 110 * MIB
    return {"memory": memory, "context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}
