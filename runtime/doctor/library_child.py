"""Asks the installed llama.cpp about itself, as a child process that it may end; `library_check.py` starts it.

Prints a line of JSON for each fact as soon as it is known, `[name, value]`, so that what came before an end is known.
"""

from __future__ import annotations

import json


def main(model: str) -> None:
    """Import the library, then ask it one thing after the other, and about the file `model` where one is named."""
    try:
        from edge_run.runtime.llama import _ggml as ggml
        from edge_run.runtime.llama._ggml import L
    except Exception as error:
        return _tell("import_error", f"{type(error).__name__}: {error}")
    _tell("is_imported", True)
    _tell("mismatch", ggml.check_library())
    _tell("system_info", L.llama_print_system_info().decode("utf-8", "replace"))
    _tell("has_gpu_support", bool(L.llama_supports_gpu_offload()))
    _tell("gpus", [(gpu.description, gpu.name) for gpu in ggml.gpu_devices()])
    _tell("repacked", _repacked_kernels())
    if model:
        _tell("model_error", _load_vocabulary(model))
    return None


def _repacked_kernels() -> dict[str, int]:
    """Return the types of weights with repacked kernels here, and the rows that these compute at once."""
    from edge_run.runtime.llama.repacking import types_with_kernels

    return types_with_kernels()


def _load_vocabulary(path: str) -> str:
    """Return why llama.cpp does not know the model at `path`, or an empty string. Reads its header only."""
    import os

    from edge_run.runtime.llama import _ggml as ggml
    from edge_run.runtime.llama._ggml import L

    lines: list[str] = []
    parameters = L.llama_model_default_params()
    parameters.vocab_only = True
    parameters.n_gpu_layers = 0
    with ggml.log.listening(lines.append):
        model = L.llama_model_load_from_file(os.fsencode(path), parameters)
    if model:
        L.llama_model_free(model)
        return ""
    return next((line for line in lines if "error" in line), "it cannot be loaded")


def _tell(name: str, value: object) -> None:
    print(json.dumps([name, value]), flush=True)
