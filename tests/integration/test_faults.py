"""Odd files, odd sizes, other processes, hard limits: the text is right, or the error says what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

import tiny_models
from control_groups import control_group
from edge_run.base.config import ModelConfig
from edge_run.base.units import GIB, KIB, MIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from exactness import fewest_frames, open_at
from in_child import in_child
from program import Program, begin, ending, next_line
from tiny_models import N_VOCAB, make_model

OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}
PROMPT = np.random.default_rng(0).integers(1, N_VOCAB, 40).tolist()
PAGE, CHUNK_BYTES = 4096, 16 * KIB


def logits_of(engine: Engine) -> np.ndarray:
    """The logits after a prompt and after five more tokens."""
    session = Session(engine.decoder)
    rows = [session.feed(PROMPT)[0].copy()]
    rows += [session.step(token).copy() for token in (3, 1, 4, 1, 5)]
    return np.stack(rows)


def compare(path: Path, **options: Any) -> None:
    """Assert that `path` streams under little memory, and computes what llama.cpp computes."""
    plain = Engine.open(path, ModelConfig(**{**OPTIONS, **options}, backend="llama.cpp"))
    wanted = logits_of(plain)
    plain.close()
    with fewest_frames(0):
        engine = open_at(path, 0.0, {**OPTIONS, **options}, chunk_bytes=CHUNK_BYTES)
    assert engine.plan.streamed_bytes_per_pass > 0
    for _ in range(2):
        assert np.array_equal(logits_of(engine), wanted)
        engine.decoder.rewind(0, 0)
    engine.close()


# Files


def rewrite(source: Path, target: Path, alignment_bytes: int) -> None:
    """Write the model again with every tensor at a multiple of `alignment_bytes`."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    writer.add_custom_alignment(alignment_bytes)
    tiny_models._copy_metadata(reader, writer)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    tiny_models._finish(writer)


@in_child
def test_tensors_that_begin_where_chunks_do(llama: Path) -> None:
    """Every edge of a tensor is the edge of a chunk, and of the file."""
    aligned = llama.with_name("aligned.gguf")
    rewrite(llama, aligned, CHUNK_BYTES)
    compare(aligned)


@pytest.mark.parametrize("extra_bytes", [1, PAGE - 1, PAGE, 3 * PAGE + 1])
def test_files_with_something_behind_the_last_tensor(llama: Path, extra_bytes: int) -> None:
    """The end of the file falls anywhere in a page; llama.cpp gives back what it does not use but for the last page."""
    longer = llama.with_name(f"longer-{extra_bytes}.gguf")
    longer.write_bytes(llama.read_bytes() + b"\xaa" * extra_bytes)
    _compare(path=longer)
    longer.unlink()


@in_child
def _compare(path: Path) -> None:
    compare(path)


@pytest.mark.parametrize("name", ["née 'Ω' (deleted).gguf", "two\nlines.gguf", "not-utf-8-\udcff.gguf"], ids=ascii)
def test_names_that_shells_do_not_like(llama: Path, name: str) -> None:
    _names_that_shells_do_not_like(llama=llama, name=name)


@in_child
def _names_that_shells_do_not_like(llama: Path, name: str) -> None:
    odd = llama.parent / "a folder" / name
    odd.parent.mkdir(exist_ok=True)
    odd.symlink_to(llama)
    os.chdir(odd.parent)
    compare(Path(odd.name))


@in_child
def test_a_file_that_is_removed_while_it_is_open(folder: Path) -> None:
    """It stays until it is closed, as files do."""
    path = make_model("llama", folder, seed=3)
    plain = Engine.open(path, ModelConfig(**OPTIONS, backend="llama.cpp"))
    wanted = logits_of(plain)
    plain.close()
    engine = open_at(path, 0.0, OPTIONS)
    path.unlink()
    assert np.array_equal(logits_of(engine), wanted)
    engine.close()


# Sizes


@in_child
def test_chunks_of_one_page(llama: Path) -> None:
    """Thousands of frames and of mappings."""
    import exactness

    exactness.CHUNK_BYTES = PAGE
    compare(llama)


@pytest.mark.parametrize("context_tokens", [1, 17, 4096])
def test_contexts_that_are_tiny_or_longer_than_trained(llama: Path, context_tokens: int) -> None:
    _contexts(path=llama, context_tokens=context_tokens)


@in_child
def _contexts(path: Path, context_tokens: int) -> None:
    if context_tokens < 256:
        from edge_run import ContextFull, Model

        with Model(path, **{**OPTIONS, "context_tokens": context_tokens}) as model:
            assert model.plan.context_tokens == 256, "llama.cpp rounds it up, and so much is used"
            with pytest.raises(ContextFull):
                model.generate([1] * 256).result()
            assert model.generate([1] * 250).result().finish_reason == "context"
    else:
        compare(path, context_tokens=context_tokens)


@in_child
def test_a_budget_beyond_all_measure(llama: Path) -> None:
    engine = Engine.open(llama, ModelConfig(**OPTIONS, memory=1000 * GIB))
    assert engine.plan.mode == "resident"
    assert logits_of(engine).shape == (6, N_VOCAB)
    engine.close()


# Other processes

STREAM = """
    import json, sys
    from pathlib import Path
    from edge_run import Model
    print("loading", flush=True)
    with Model(sys.argv[1], **json.loads(sys.argv[2])) as model:
        stream = model.generate(list(range(5, 25)), max_tokens=int(sys.argv[3]), temperature=0)
        next(stream)
        print("answering", flush=True)
        answer = stream.result()
        memory = answer.memory
        print(json.dumps([model.plan.mode, answer.token_ids, memory.peak_bytes, memory.budget_bytes]))
"""


def start(path: Path, options: dict[str, Any], n_tokens: int, cgroup: Path | None = None) -> subprocess.Popen[str]:
    """Generate in another process, in `cgroup` from its first instruction on."""
    source, words = textwrap.dedent(STREAM), [str(path), json.dumps(options), str(n_tokens)]
    place = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if cgroup is None:
        return begin(Program(["-c", *words], source=source), **place)
    entering = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(cgroup)]
    return subprocess.Popen([*entering, sys.executable, "-c", source, *words], **place)


def finish(process: subprocess.Popen[str]) -> Any:
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, f"exit {process.returncode}\n{errors}"
    return json.loads(out.splitlines()[-1])


def test_two_processes_stream_one_file_at_once(grown: Path) -> None:
    options = {**OPTIONS, "memory": 160 * MIB}
    processes = [start(grown, options, 10) for _ in range(2)]
    one, two = map(finish, processes)
    (_, wanted, *_) = finish(start(grown, {**OPTIONS, "backend": "llama.cpp"}, 10))
    assert one[:2] == two[:2] == ["streamed", wanted]


def test_a_killed_process_leaves_nothing(grown: Path, tmp_path: Path) -> None:
    """Killed while it loads, or while it streams: nothing was written but what is known of the file."""
    options = {**OPTIONS, "context_tokens": 2048, "memory": 160 * MIB, "cache_folder": str(tmp_path)}
    for word, delay_s in (("loading", 0.0), ("loading", 0.2), ("loading", 0.5), ("answering", 0.3)):
        with ending(start(grown, options, 10_000)) as process:
            while (line := next_line(process)) != f"{word}\n":
                assert line, process.communicate()
            time.sleep(delay_s)
            process.send_signal(signal.SIGKILL)
            _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"it ended before it was killed\n{errors}"
    assert {path.name for path in tmp_path.iterdir()} <= {"inspected"}


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup of either version, without swap; skips where none can be made."""
    limit = str(limit_bytes)
    new = {"memory.max": limit, "memory.swap.max": "0"}
    with control_group(new, "memory", {"memory.limit_in_bytes": limit, "memory.swappiness": "0"}) as group:
        yield group


@pytest.mark.root
@pytest.mark.parametrize("is_named", [True, False], ids=["budget named", "budget found"])
def test_a_machine_with_no_more_than_the_budget(grown: Path, is_named: bool) -> None:
    """The kernel counts, and kills: everything the process holds is in the budget, page tables and all."""
    limit = 160 * MIB if is_named else 300 * MIB
    options = {**OPTIONS, "memory": limit} if is_named else OPTIONS
    with memory_cgroup(limit) as group:
        mode, tokens, peak_bytes, budget_bytes = finish(start(grown, options, 20, group))
    assert mode == "streamed"
    assert peak_bytes <= budget_bytes <= limit
    (_, wanted, *_) = finish(start(grown, {**OPTIONS, "backend": "llama.cpp"}, 20))
    assert tokens == wanted
