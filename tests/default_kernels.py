"""Whether the kernels that llama.cpp takes by default on this machine are those of runs with repacked weights."""

from __future__ import annotations

import pytest

from edge_run.runtime.llama import _ggml as ggml


def _others() -> list[str]:
    names = map(ggml.buffer_type_name, ggml.repacked_buffer_types())
    return [name for name in names if name != "CPU_REPACK"]


# A processor may name AMX, and a virtual machine forbid it: then llama.cpp's default ends the process.
needs_default_kernels = pytest.mark.skipif(
    bool(_others()), reason=f"llama.cpp's default uses {_others()} too, which runs do not"
)
