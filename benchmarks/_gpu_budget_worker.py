"""One run under two budgets, in a process of its own; prints a line of JSON with what was held at most.

    python _gpu_budget_worker.py MODEL.gguf GPU_BYTES MEMORY_BYTES

MEMORY_BYTES 0 is the smallest that works. Further arguments: `copies` lets passes of many tokens run on the GPU whole.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from edge_run.devices.host.memory import process_memory
from edge_run.runtime.gpu.devices import find_gpus
from edge_run.runtime.gpu.loading import gpu_tensors
from edge_run.runtime.llama import _ggml as ggml
from gpu_pairs import logits_of, open_engine


def main() -> None:
    """Run, and print."""
    path, gpu_bytes, memory_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    free_before = find_gpus()[0].free_bytes
    with open_engine(path, gpu_bytes, memory_bytes, op_offload="copies" in sys.argv[4:]) as engine:
        logits_of(engine)
        plan, gpu = engine.plan, engine.plan.gpu
        assert gpu is not None
        figures = {
            "gpu": f"{gpu.device} ({find_gpus()[0].description})",
            "mode": plan.mode,
            "layers": gpu.layers,
            "copies": gpu.op_offload,
            "gpu_budget": gpu_bytes,
            "gpu_taken": ggml.allocated_bytes(gpu_tensors(engine.model)) + gpu.kv_bytes + gpu.buffer_bytes,
            "gpu_less_free": free_before - find_gpus()[0].free_bytes,
            "memory_budget": plan.budget_bytes,
            "memory_peak": process_memory().peak_bytes,
            "swapped": process_memory().swapped_bytes,
            "streamed_bytes": plan.streamed_bytes_per_pass,
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
