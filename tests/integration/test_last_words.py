"""What llama.cpp ends the process over is said in one line: nobody is left with `Aborted` or nothing at all."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from edge_run.base.errors import KernelError
from injector import build, compiler, environment
from tiny_models import make_model

WORDS = ("--backend", "llama.cpp", "-p", "1 2 3", "--temp", "0", "-t", "1", "-c", "1024", "--no-check-file")


LATE = """
    import sys
    sys.path.insert(0, sys.argv.pop(1))
    from edge_run.cli.app import main
    from edge_run.runtime.llama.model import LlamaModel
    from injector import Injector
    real = LlamaModel.__init__
    def load(*arguments, **options):
        Injector().arm("heap", "llama", 1, 12)
        real(*arguments, **options)
    LlamaModel.__init__ = load
    main()
"""


def start(path: Path, *more: str, script: str = "", **environ: str) -> subprocess.Popen[str]:
    program = ["-c", textwrap.dedent(script), str(Path(__file__).parents[1])] if script else ["-m", "edge_run"]
    command = [sys.executable, *program, str(path), *WORDS, *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}
    )


def test_a_file_that_is_cut_while_llama_cpp_has_it_mapped(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    with start(path, "-n", "8000", "-c", "8192") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        os.truncate(path, 4096)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == KernelError.exit_code
    last = errors.strip().splitlines()[-1]
    assert "SIGBUS" in last
    assert str(path) in last
    assert "if its file is cut" in errors, "it was said beforehand that this may happen"


@pytest.mark.skipif(compiler() is None, reason="no C compiler builds the injector")
def test_an_allocation_that_llama_cpp_asserts(tmp_path: Path) -> None:
    """The first one when a model is loaded: ggml aborts."""
    path, library = make_model("llama", tmp_path), build(tmp_path)
    with start(path, "-n", "2", script=LATE, **environment(library)) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == KernelError.exit_code, errors
    assert errors.count("\n") <= 3, errors
    assert "llama.cpp ended the process: ggml" in errors
