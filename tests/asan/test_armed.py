"""What `make test-asan` finds is worth something only where a mistake is found: here are two, on purpose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif("libasan" not in os.environ.get("LD_PRELOAD", ""), reason="of `make test-asan`")

FROM_PYTHON = """
import ctypes
ctypes.memset(ctypes.create_string_buffer(100), 0, 101)
"""
FROM_LLAMA_CPP = """
import ctypes, llama_cpp.llama_cpp
from llama_cpp._ggml import libggml
source, target = (ctypes.c_float * 64)(), ctypes.create_string_buffer(2 * 63)
libggml.ggml_fp32_to_fp16_row(source, target, ctypes.c_int64(64))
"""


@pytest.mark.parametrize("code", [FROM_PYTHON, FROM_LLAMA_CPP], ids=["python", "llama.cpp"])
def test_one_byte_too_many_is_reported(code: str) -> None:
    environment = {**os.environ, "ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:log_path=stderr"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
