"""Stores the matrices of a GGUF in one type, as the benchmarks of real models need it: `llama-quantize --pure`.

    requantize.py SOURCE TARGET [--type Q4_0]

llama.cpp's own quantiser, from whatever type SOURCE has: published files are seldom of one type, and what is measured
of kernels, or of repacked weights, wants one. Going from four bits to four bits costs quality, and no speed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

FILE_TYPES = {"F16": 1, "BF16": 32, "Q4_0": 2, "Q8_0": 7, "Q4_K": 15, "Q6_K": 18, "IQ4_NL": 25}  # llama_ftype


def requantize(source: Path, target: Path, kind: str = "Q4_0") -> Path:
    """Write `source` with all matrices, embeddings too, in the type `kind` to `target`; return `target`.

    `target` appears whole or not at all.
    """
    import llama_cpp.llama_cpp as low

    params = low.llama_model_quantize_default_params()
    params.ftype, params.pure, params.allow_requantize = FILE_TYPES[kind], True, True
    params.nthread = len(os.sched_getaffinity(0))
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        if low.llama_model_quantize(os.fsencode(source), os.fsencode(draft), ctypes.byref(params)) != 0:
            raise SystemExit(f"{source}: llama.cpp could not requantise it to {kind}")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def main() -> None:
    """Requantise what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=FILE_TYPES, default="Q4_0")
    arguments = parser.parse_args()
    requantize(arguments.source, arguments.target, arguments.type)


if __name__ == "__main__":
    main()
