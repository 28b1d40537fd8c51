"""What cannot be run is refused by one line with a code of its kind; nothing is left of it."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edge_run import KernelError, Model, ModelFileError, NotSupported, TierReadError
from edge_run.base.units import MIB
from kit_models import KIT
from mutations import changed, deadly, parse
from program import run_anew, run_program
from tiny_models import make_model, split_model

PROMPT = ("-p", "hi", "-n", "2")
KEPT = {"inspected", "profiles", "micro-batch"}
WAIT_S = 110
OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}

Result = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this module are made."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return make_model("llama", folder)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def refused(environment: dict[str, str], cache: Path, tmp_path: Path) -> Callable[..., str]:
    """Run the command line, which must refuse: with one line, one code, and nothing left in the cache folder."""

    def run(code: int, pattern: str, *arguments: object, **how: Any) -> str:
        words = [*map(str, arguments), "--cache-dir", str(cache), *PROMPT]
        run = run_anew if how else run_program
        result = run(*words, environment=environment, folder=tmp_path, **how)
        assert (result.returncode, result.stdout) == (code, ""), result.stderr
        assert re.fullmatch(rf"edge-run: [^\n]*{pattern}[^\n]*\n", result.stderr), result.stderr
        assert not cache.is_dir() or {path.name for path in cache.iterdir()} <= KEPT
        return result.stderr

    return run


def write(path: Path, architecture: str, kind: str = "") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    if kind:
        writer.add_type(kind)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# What the file is


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("clip", "mmproj", "a projector for images or sound.*give the model that it belongs to"),
        ("clip", "", "a projector for images or sound"),
        ("llama", "adapter", "an adapter.*give the model that it belongs to, or merge the two"),
        ("controlvector", "", "a control vector"),
        ("imatrix", "imatrix", "an importance matrix"),
        ("bert", "", "an encoder, which makes embeddings and no text; use `edge-run embed`, or give a model"),
        ("gemma-embedding", "model", "an encoder"),
        ("t5", "", "a model with an encoder"),
        ("eagle3", "", "the draft of another model"),
        ("newer", "", "unknown model architecture: 'newer'; install a llama-cpp-python that knows it"),
    ],
)
def test_files_that_are_no_models_to_run(refused, tmp_path: Path, architecture: str, kind: str, message: str) -> None:
    path = write(tmp_path / "odd.gguf", architecture, kind)
    assert refused(NotSupported.exit_code, message, path.name).startswith("edge-run: odd.gguf: ")
    with pytest.raises(NotSupported, match=message):
        Model(path, cache_folder=tmp_path, embeddings=False)


def test_a_vocabulary_without_weights(refused, llama: Path, tmp_path: Path) -> None:
    parts = parse(llama.read_bytes())
    parts.tensors.clear()
    (tmp_path / "vocabulary.gguf").write_bytes(parts.write())
    refused(NotSupported.exit_code, "a vocabulary without a model", "vocabulary.gguf")


def test_an_unknown_quantisation(refused, llama: Path, tmp_path: Path) -> None:
    raw = bytearray(llama.read_bytes())
    at = raw.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    raw[at : at + 4] = struct.pack("<I", 99)
    (tmp_path / "future.gguf").write_bytes(raw)
    refused(ModelFileError.exit_code, "'blk.0.attn_q.weight' has the ggml type 99", "future.gguf")


def test_a_download_that_is_not_finished(refused, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "part.gguf").write_bytes(llama.read_bytes()[:-MIB])
    refused(ModelFileError.exit_code, r"part\.gguf: truncated: .* \(1 MiB missing\)", "part.gguf")


def test_shards_that_do_not_belong_together(refused, folder: Path, tmp_path: Path) -> None:
    shards = split_model(make_model("llama", folder), 3, tmp_path)
    other = split_model(make_model("qwen3", folder), 3, tmp_path)
    refused(ModelFileError.exit_code, r"shard 2 of 3, the first is needed; open llama-1-0-00001", shards[1])
    shutil.copy(other[1], shards[1])
    refused(ModelFileError.exit_code, r"tensors.*shards of different models", shards[0])
    shards[1].unlink()
    refused(ModelFileError.exit_code, r"llama-1-0-00002-of-00003\.gguf: missing: shard 2 of 3", shards[0])


@pytest.mark.parametrize(
    ("name", "message"), [("deadly", "GGML_ASSERT.* failed"), ("shape", "blk.0.attn_k.weight.* wrong shape")]
)
def test_what_llama_cpp_does_not_like(refused, llama: Path, tmp_path: Path, cache: Path, name: str, message) -> None:
    """Also what it likes so little that it ends the process; neither is taken for known the next time."""
    path = tmp_path / f"{name}.gguf"
    if name == "deadly":
        deadly(llama, path)
    else:
        changed(llama, path, "llama.attention.head_count", 2)
    for _ in range(2):
        told = refused(ModelFileError.exit_code, message, path.name)
        assert told.startswith(f"edge-run: {name}.gguf: llama.cpp ")
    assert not list(cache.glob("inspected/*"))


def test_the_parent_lives_and_keeps_nothing(llama: Path, tmp_path: Path, cache: Path) -> None:
    path, threads = deadly(llama, tmp_path / "deadly.gguf"), {*threading.enumerate()}
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ModelFileError, match=r"deadly\.gguf: llama\.cpp ended over it \(SIGABRT: ") as caught:
            Model(path, **OPTIONS, cache_folder=cache)
        assert "\n" not in str(caught.value)
    assert {*threading.enumerate()} <= threads  # of tests before this one, some may have ended meanwhile
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with Model(llama, **OPTIONS, cache_folder=cache) as model:
        assert model.generate([1], max_tokens=2, temperature=0).result().completion_tokens == 2


def test_weights_that_are_not_numbers(refused, llama: Path, tmp_path: Path) -> None:
    parts = parse(llama.read_bytes())
    norm = next(tensor for tensor in parts.tensors if tensor.name == "output_norm.weight")
    norm.data = struct.pack("<f", math.nan) * (len(norm.data) // 4)
    (tmp_path / "nan.gguf").write_bytes(parts.write())
    refused(KernelError.exit_code, "the best logit is nan.*copy or download the model again", "nan.gguf")


# Budget and context


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--memory", "30MiB"], 4, r"memory budget 30 MiB: too small for this model, it needs at least \d+ MiB"),
        (["-c", "1000000000000"], 2, "context length 1000000000000"),
    ],
)
def test_budgets_and_contexts(refused, arguments: list[str], code: int, message: str) -> None:
    refused(code, message, KIT, *arguments)


@pytest.mark.parametrize("tokens", ["100000", "2000000000"])
def test_a_context_that_does_not_fit_opens_shorter_and_says_so(
    tokens: str, environment: dict[str, str], cache: Path
) -> None:
    words = [KIT, "-c", tokens, "--memory", "300MiB", "--json", "--cache-dir", cache, *PROMPT]
    result = run_program(*words, environment=environment)
    assert result.returncode == 0, result.stderr
    assert re.search(r"a context of [\d,]+ tokens, as the budget has no room for [\d,]+\n", result.stderr)
    found = json.loads(result.stdout)
    assert 512 <= found["plan"]["context_tokens"] < int(tokens) <= found["plan"]["wanted_context_tokens"]
    assert found["memory"]["peak_bytes"] <= found["memory"]["budget_bytes"]


def test_a_context_beyond_the_training_is_a_notice(environment: dict[str, str], cache: Path) -> None:
    result = run_program(KIT, "-c", "4096", "--cache-dir", cache, *PROMPT, environment=environment)
    assert result.returncode == 0
    assert re.match(r"a context of 4,096 tokens, the model was trained on 2,048: [^\n]*\n", result.stderr)


def test_a_trained_context_that_cannot_be(llama: Path, tmp_path: Path, cache: Path) -> None:
    path = changed(llama, tmp_path / "long.gguf", "llama.context_length", 2**31)
    with Model(path, cache_folder=cache) as model:
        assert (model.trained_context_tokens, model.plan.context_tokens) == (0, 4096)


# Storage


def test_a_limit_on_the_length_of_files(refused) -> None:
    """The stub is as long as the model while it is made: here no file may be longer than 1 MiB."""
    limits = (MIB, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    how = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)}
    refused(TierReadError.exit_code, r"kit.*cannot make a file of [\d,]+ bytes.*File too large.*ulimit -f", KIT, **how)


RUNS = """
    import errno, os, sys
    from edge_run.cli import main
    real, change = os.preadv, sys.argv.pop(1)

    def preadv(fd, buffers, offset, *rest):
        if offset > 60 << 20:
            if change == "error":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            os.utime(sys.argv[1])
        return real(fd, buffers, offset, *rest)

    os.preadv = preadv
    main()
"""


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("error", 5, r"reading \d+ bytes at \d+ failed \(Input/output error\)"),
        ("touch", 3, "changed while it was in use"),
    ],
)
def test_a_drive_that_fails_and_a_file_that_changes_in_mid_stream(
    environment: dict[str, str], grown: Path, tmp_path: Path, change: str, code: int, message: str
) -> None:
    path = shutil.copy(grown, tmp_path / "model.gguf")
    flags = [
        "--memory",
        "160MiB",
        "-c",
        "256",
        "-ub",
        "16",
        "-t",
        "1",
        "--temp",
        "0",
        "--cache-dir",
        str(tmp_path / "c"),
    ]
    words = [sys.executable, "-c", textwrap.dedent(RUNS), change, str(path), *flags, "-p", "hi", "-n", "20"]
    result = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=WAIT_S, check=False)
    assert result.returncode == code, result.stderr
    assert re.fullmatch(rf"edge-run: [^\n]*model\.gguf: [^\n]*{message}[^\n]*\n", result.stderr), result.stderr
    assert {path.name for path in (tmp_path / "c").iterdir()} <= KEPT
