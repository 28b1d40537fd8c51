"""One model with parts of it on a GPU: logits against llama.cpp's own loader with the same part, and what was taken.

    python _gpu_worker.py MODEL.gguf STEPS

Prints a line of JSON for each part (STEPS budgets of the GPU, from the smallest that works to all of the model), before
anything is computed with it, and then for each budget of memory: whatever is free, and the smallest that works.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.gpu.offload import Offload
from gpu_pairs import bytes_of, differing, logits_of, offloads, open_engine


def main() -> None:
    """Compare, and print."""
    path, steps = Path(sys.argv[1]), int(sys.argv[2])
    for choice, may_copy in itertools.product(offloads(path, steps, op_offload=True), (False, True)):
        gpu_memory, placement = choice.sizes.total_bytes, choice.placement
        part = {"layers": placement.n_layers, "narrow": placement.n_narrow, "on_host": placement.host_patterns}
        print(json.dumps({"part": part}), flush=True)
        wanted: dict[bool, list[np.ndarray]] = {}
        for memory in (None, 0):
            with open_engine(path, gpu_memory, memory, op_offload=may_copy) as engine:
                found, taken = logits_of(engine), figures(choice, engine)
                used = engine.offload.placement if engine.offload else placement
            if (copies := bool(taken["copies"])) not in wanted:
                same = bytes_of(path, used, op_offload=copies)
                with open_engine(path, same, backend="llama.cpp", op_offload=copies) as engine:
                    wanted[copies] = logits_of(engine)
            print(json.dumps(taken | {"different": differing(wanted[copies], found)}), flush=True)


def figures(choice: Offload, engine: Engine) -> dict[str, Any]:
    """Return what `engine` took, whose part on the GPU is `choice`."""
    gpu = engine.plan.gpu
    assert gpu is not None
    return {
        "gpu": f"{choice.gpu.name} ({choice.gpu.description})",
        "layers": gpu.layers,
        "narrow": gpu.narrow_layers,
        "copies": gpu.op_offload,
        "gpu_budget": gpu.budget_bytes,
        "gpu_taken": gpu.weights_bytes + gpu.kv_bytes + gpu.buffer_bytes,
        "mode": engine.plan.mode,
        "by_expert": engine.plan.expert_bytes > 0,
        "streamed_bytes": engine.plan.streamed_bytes_per_pass,
    }


if __name__ == "__main__":
    main()
