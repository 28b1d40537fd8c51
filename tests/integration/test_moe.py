"""Mixtures of experts, streamed: what is read, what survives failing reads, and the traces of what routers choose."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_run
import fault_scenarios
import small_engines
from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, Cancelled, ConfigError, NotSupported, TierReadError
from edge_run.base.interrupt import Interrupt
from edge_run.base.units import MIB
from edge_run.prefetch.routes import RouteReader, RouteWriter
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.forecasting.forecast import _matmul
from edge_run.runtime.streaming.experts import ExpertStreaming
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.gguf_format import ARRAY
from edge_run.tiers.source import SourceFile
from exactness import CHUNK_BYTES, open_at
from in_child import in_child
from mutations import parse
from program import Result, ending, run_program
from sabotage import sabotage
from served import wait_for
from tiny_models import make_model

OPTIONS: dict[str, Any] = {
    "context_tokens": 256, "micro_batch_tokens": 16, "threads": 1, "check_file": False,
}  # fmt: skip
PROMPT = small_engines.PROMPT
TEXT = "It was a dark night, and nobody knew which of them would be asked next."


def test_layers_may_use_different_numbers_of_experts(moe: Path, tmp_path: Path) -> None:
    parts = parse(moe.read_bytes())
    used, layers = parts.entry("qwen3moe.expert_used_count"), parts.entry("qwen3moe.block_count")
    assert used
    assert layers
    n_used = used.value
    used.kind, used.element, used.value = ARRAY, used.kind, [n_used] * layers.value
    path = tmp_path / "array.gguf"
    path.write_bytes(parts.write())
    assert read_gguf(path).used_experts == read_gguf(moe).used_experts == n_used > 1
    found = []
    for file in (moe, path):
        engine = open_at(file, 0.2, {**OPTIONS, "cache_folder": tmp_path / "cache"}, by_expert=True)
        assert engine.plan.expert_bytes
        found.append(greedy(engine))
        engine.close()
    assert found[0] == found[1]
    experts = next(tensor for tensor in read_gguf(path).tensors if len(tensor.shape) == 3)
    assert _matmul(read_gguf(path), experts, is_expert=True, is_head=False).n_used == n_used


@pytest.fixture
def moe(folder: Path) -> Path:
    return make_model("qwen3moe", folder)


def greedy(engine: Engine, n_tokens: int = 12) -> list[int]:
    engine.decoder.rewind(0, 0)
    return small_engines.greedy(Session(engine.decoder), PROMPT, n_tokens)


@in_child
def test_a_token_reads_no_more_than_the_experts_that_it_uses(moe: Path) -> None:
    """Chunks are as large as pages are here, so that what is read beside is little."""
    engine = open_at(moe, 0.3, OPTIONS)
    try:
        assert engine.plan.expert_bytes > 0
        session = Session(engine.decoder)
        logits, _ = session.feed(PROMPT)
        gguf = read_gguf(moe)
        experts = [tensor for tensor in gguf.tensors if len(tensor.shape) == 3]
        used = gguf.value("expert_used_count")
        assert isinstance(used, int)
        pieces = sum(used * (tensor.size_bytes // tensor.shape[2] + 2 * CHUNK_BYTES) for tensor in experts)
        for _ in range(8):
            before = engine.read_totals.bytes_read
            logits = session.step(int(logits.argmax()))
            assert engine.read_totals.bytes_read - before <= pieces
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_after_reads_that_fail_anywhere_the_tokens_are_right(name: str, folder: Path) -> None:
    _after_reads_that_fail(path=make_model(name, folder, scale=2))


@in_child
def _after_reads_that_fail(path: Path) -> None:
    plain = Engine.open(path, ModelConfig(**OPTIONS, backend="llama.cpp"))
    wanted = greedy(plain)
    plain.close()
    saboteur = sabotage()
    engine, n_errors = open_at(path, 0.3, OPTIONS), 0
    try:
        assert engine.plan.expert_bytes > 0
        for fails_at, n_failures in ((0, 1), (7, 3), (30, 1), (60, 20), (100, 50), (0, 4)):
            saboteur.set(fails_at, n_failures)
            try:
                greedy(engine)
            except TierReadError:
                n_errors += 1
            saboteur.set(-(10**9))
            assert greedy(engine) == wanted
    finally:
        engine.close()
    assert n_errors >= 1, "too few reads failed where they were needed"


class Impatient(Interrupt):
    """It has come when it was asked about `left` times."""

    left = 0

    @property
    def is_set(self) -> bool:
        self.left -= 1
        return self.left == 0


@in_child
def test_a_pass_that_is_cancelled_anywhere_leaves_the_next_one_right(moe: Path) -> None:
    plain = Engine.open(moe, ModelConfig(**OPTIONS, backend="llama.cpp"))
    wanted = greedy(plain)
    plain.close()
    engine = open_at(moe, 0.3, OPTIONS)
    try:
        engine.interrupt.__class__ = Impatient
        for n_checks in (1, 3, 9, 20):
            engine.interrupt.left = n_checks  # type: ignore[attr-defined]
            with pytest.raises(Cancelled):
                greedy(engine)
            assert greedy(engine) == wanted
    finally:
        engine.close()


# Traces


def rows_of(trace: Path) -> list[tuple[int, int, int, int, int]]:
    with RouteReader(trace) as reader:
        return [(route.phase, route.step, route.layer, route.slot, route.expert) for route in reader]


@in_child
def test_a_trace_is_the_same_streamed_and_resident(moe: Path, tmp_path: Path) -> None:
    engine = open_at(moe, 0.3, OPTIONS)
    budget = engine.budget_bytes
    engine.close()
    found = []
    for name, options in {
        "resident": {},
        "streamed": {"memory": budget + 8 * MIB},
        "plain": {"backend": "llama.cpp"},
    }.items():
        path = tmp_path / f"{name}.csv"
        recording = edge_run.trace(moe, TEXT, path, max_tokens=9, config=ModelConfig(**OPTIONS, **options))
        found.append(rows_of(path))
        assert recording.decoded_tokens == 9
    assert found[0] == found[1] == found[2]
    prefill = Counter(layer for phase, _, layer, slot, _ in found[0] if (phase, slot) == (0, 0))
    gguf = read_gguf(moe)
    layers = sorted({tensor.name.split(".")[1] for tensor in gguf.tensors if len(tensor.shape) == 3})
    assert sorted(prefill) == [int(layer) for layer in layers]
    assert max(prefill.values()) == recording.prompt_tokens
    decoded = [row for row in found[0] if row[0] == 1]
    assert len(decoded) == 9 * len(layers) * int(str(gguf.value("expert_used_count")))
    assert {step for _, step, *_ in decoded} == set(range(9))


@pytest.mark.parametrize("name", ["qwen3moe", "grovemoe"])
def test_a_trace_can_be_replayed(name: str, folder: Path, tmp_path: Path) -> None:
    """Layers of the second model choose twice, the second time among experts that go with several of the first."""
    model, path = make_model(name, folder), tmp_path / "trace.csv"
    recording = edge_run.trace(model, TEXT, path, max_tokens=5, **OPTIONS)
    result = edge_run.replay(path)
    assert (result.decoded_tokens, result.layers, result.experts) == (5, recording.layers, recording.experts)
    assert recording.decoded_tokens == 5
    decoded = Counter((step, layer) for phase, step, layer, *_ in rows_of(path) if phase == 1)
    assert len(decoded) == 5 * recording.layers
    assert set(decoded.values()) == {read_gguf(model).used_experts}


def test_what_cannot_be_traced(moe: Path, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with pytest.raises(NotSupported, match="no mixture of experts"):
        edge_run.trace(make_model("llama", folder), TEXT, path, **OPTIONS)
    with pytest.raises(ConfigError, match="prompt: is empty"):
        edge_run.trace(moe, "", path, **OPTIONS)
    with pytest.raises(ConfigError, match="exact: its passes have padding tokens"):
        edge_run.trace(moe, TEXT, path, exact=True, **OPTIONS)
    with pytest.raises(ConfigError, match="cannot be written: its folder is not there"):
        edge_run.trace(moe, TEXT, tmp_path / "nowhere" / "trace.csv", **OPTIONS)
    assert list(tmp_path.iterdir()) == [], "nothing is left of a trace that was not finished"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"exists.*is_overwritten=True"):
        edge_run.trace(moe, TEXT, path, **OPTIONS)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("owner", "name", "number", "kind", "told"),
    [
        (Engine, "open", errno.ENOMEM, BudgetError, "^tracing: out of memory"),
        (Engine, "open", errno.EMFILE, TierReadError, "^tracing: Too many open files; close some files"),
        (RouteWriter, "write", errno.ENOSPC, TierReadError, r"trace\.csv: cannot be written \(No space left"),
    ],
)
def test_what_the_model_is_refused_is_not_blamed_on_the_file_of_the_trace(
    moe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    number: int,
    kind: type[Exception],
    told: str,
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(kind, match=told):
        edge_run.trace(moe, TEXT, tmp_path / "trace.csv", **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_never_replaces_its_model(moe: Path, tmp_path: Path) -> None:
    model, link = tmp_path / "model.gguf", tmp_path / "link.gguf"
    model.write_bytes(moe.read_bytes())
    link.symlink_to(model)
    for path in (model, link):
        with pytest.raises(ConfigError, match="is the model itself; choose another name"):
            edge_run.trace(model, TEXT, path, is_overwritten=True, **OPTIONS)
    assert model.read_bytes() == moe.read_bytes()


def test_from_the_command_line(moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"

    def run(*more: str) -> Result:
        return run_program("trace", moe, "-n", 4, "-o", path, "-c", 256, "-t", 1, *more, text=TEXT)

    done = run("--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["trace"], told["decoded_tokens"]) == (0, str(path), 4)
    assert run("-p", TEXT).returncode == ConfigError.exit_code
    done = run("--force")
    assert (done.returncode, done.stdout) == (0, "")
    assert run("-p", "", "--force").returncode == ConfigError.exit_code
    assert rows_of(path), "what was there is there still"
    path = tmp_path / "link"
    path.symlink_to(tmp_path / "trace.csv")
    assert run("--force").returncode == 0
    assert path.is_symlink()
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert "is no file" in run("--force").stderr


def test_a_trace_that_is_interrupted_leaves_nothing(moe: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "edge_run", "trace", str(moe), "-p", TEXT, "-n", "100000", "-c", "100000"]
    words += ["-o", str(tmp_path / "trace.csv")]
    with ending(subprocess.Popen(words, stderr=subprocess.PIPE, text=True)) as process:
        wait_for(lambda: list(tmp_path.glob("*.part")))
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, notices = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in notices) == (130, False)
    assert list(tmp_path.iterdir()) == []


@in_child  # an expert that is computed before it is read ends the process, or gives other logits
def test_parts_of_experts_in_chunks_that_stay_are_waited_for(folder: Path) -> None:
    """The last chunk sticks out of the mapping, so that it stays, and only experts have a part in it."""

    def logits() -> np.ndarray:
        with fault_scenarios.moe(folder) as work:
            rows, _ = work.args[0].feed(PROMPT)  # type: ignore[attr-defined]
            return rows.copy()

    wanted = logits()
    read_into = SourceFile.read_into

    def late(self: SourceFile, address: int, length: int, offset: int) -> int:
        if offset + length >= self.size_bytes:
            time.sleep(2.0)
        return read_into(self, address, length, offset)

    SourceFile.read_into = late  # type: ignore[method-assign]
    assert np.array_equal(logits(), wanted)


@in_child
def test_dense_weights_that_do_not_fit_stream_beside_the_experts(moe: Path) -> None:
    """In one pass, bit for bit; also after the prompt was cut, and when everything is said again."""
    from edge_run.runtime.planning import experts

    experts.SEGMENT_BYTES = 0  # so that a small model's dense weights are more than a segment

    def rows(engine: Engine) -> list[np.ndarray]:
        session = Session(engine.decoder)
        found = [session.feed(PROMPT)[0].copy()]
        found += [session.step(token).copy() for token in PROMPT[:8]]
        found.append(session.feed([*PROMPT[:20], 7, 8])[0].copy())
        engine.decoder.clear()
        return [*found, Session(engine.decoder).feed(PROMPT[::-1])[0].copy()]

    plain = Engine.open(moe, ModelConfig(**OPTIONS, backend="llama.cpp"))
    wanted = rows(plain)
    plain.close()
    n_streamed = 0
    for share in (0, 0.1, 0.3):
        engine = open_at(moe, share, OPTIONS, in_order_too=not share)
        try:
            is_both = engine.plan.expert_bytes > 0 and engine.plan.window_bytes > 0
            n_streamed += is_both
            assert all(map(np.array_equal, rows(engine), wanted)), engine.plan
            if is_both:
                (stream,) = (one for one in engine._supplied.streams if isinstance(one, ExpertStreaming))
                assert stream.prefetch
                assert stream.prefetch.setting == "off", "routers come and go, so nothing may look at them"
                assert all(item.what != "prediction" for item in engine.plan.items)
                read = engine.read_totals.bytes_read
                engine.decoder.clear()
                Session(engine.decoder).step(3)
                assert engine.read_totals.bytes_read - read < engine.plan.model_bytes
        finally:
            engine.close()
    assert n_streamed >= 1, "no budget at which both stream"
