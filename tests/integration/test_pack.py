"""`edge-run pack` as a user runs it: a file beside the model that plans and runs find, if it is this model's."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import edge_run
from edge_run.base.errors import (
    ConfigError,
    ModelFileError,
    NotSupported,
    PackedFileError,
    TierReadError,
)
from edge_run.base.units import MIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine import supply
from edge_run.runtime.streaming import assemble
from edge_run.runtime.tools.pack import pack
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.gguf_format import UINT32
from edge_run.tiers.packed import PackedBlocks
from edge_run.tiers.packed_file import find_packed, packed_path
from gguf_files import container, tensor, text
from in_child import in_child
from program import ending, run_program
from served import wait_for
from small_engines import PROMPT, streaming_engine
from tiny_models import make_model

Result = subprocess.CompletedProcess[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("qwen3moe", tmp_path)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes seconds to pack."""
    folder = tmp_path_factory.mktemp("large")
    return edge_run.inflate(make_model("qwen3moe", folder), folder / "large.gguf", 512 * MIB)


def test_a_packed_model_runs_as_before_and_another_is_refused(model: Path, tmp_path: Path) -> None:
    answer = ["-p", "a", "-n", "4", "--temp", "0", "-c", "128", "-t", "1", "--no-check-file"]
    before = run_program(model, *answer).stdout
    done = run_program("pack", model)
    packed = packed_path(model)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"Wrote {packed}" in done.stderr
    assert run_program(model, *answer).stdout == before
    assert run_program("pack", model).returncode == ConfigError.exit_code
    assert run_program("pack", model, "--force").returncode == 0
    other = make_model("qwen3moe", tmp_path, seed=1)
    packed.rename(packed_path(other))
    for words in ([other, *answer], ["plan", other, "-c", "128", "--no-probe"]):
        refused = run_program(*words)
        assert refused.returncode == PackedFileError.exit_code == 13
        assert refused.stderr.count("\n") == 1
        assert "packed from another model" in refused.stderr
        assert run_program(*words, "--packed", "off").returncode == 0


def test_from_python_it_is_told_what_was_written(model: Path) -> None:
    made = edge_run.pack(str(model))
    assert isinstance(made, edge_run.Packed)
    assert (made.path, made.size_bytes) == (packed_path(model), packed_path(model).stat().st_size)
    assert 0 < made.packed_bytes < made.raw_bytes < model.stat().st_size
    assert json.loads(edge_run.to_json(made))["path"] == str(made.path)
    with pytest.raises(ConfigError, match="exists; choose another name"):
        edge_run.pack(model)
    assert edge_run.pack(model, is_overwritten=True) == made


def test_what_gains_nothing_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    for path in (make_model("qwen3moe", tmp_path, quantisation="Q4_0"), make_model("llama", tmp_path)):
        done = run_program("pack", path)
        assert (done.returncode, done.stderr.count("\n")) == (NotSupported.exit_code, 1), done.stderr
        assert not packed_path(path).exists()


def test_the_plan_counts_what_unpacking_takes(model: Path, tmp_path: Path) -> None:
    options = {"context_tokens": 128, "micro_batch_tokens": 16, "threads": 1, "cache_folder": tmp_path}
    grown = edge_run.inflate(model, tmp_path / "grown.gguf", 96 << 20)
    budget = 130 << 20
    without = edge_run.plan(grown, memory=budget, **options)  # type: ignore[arg-type]
    pack(grown)
    packed = edge_run.plan(grown, memory=budget, **options)  # type: ignore[arg-type]
    sizes = {item.what: item.size_bytes for item in packed.items}
    assert without.expert_bytes > packed.expert_bytes > 0
    assert sizes["packed"] > 0
    assert sum(sizes.values()) <= budget
    assert packed.streamed_bytes_per_pass < 0.9 * without.streamed_bytes_per_pass


def test_a_drive_that_cannot_read_the_model_is_not_said_to_be_full(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = os.pread, iter(range(1000))

    def failing(descriptor: int, length: int, offset: int) -> bytes:
        if next(asked) == 40:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(TierReadError, match=r"cannot be read at byte .*Input/output error"):
        pack(model)
    assert list(tmp_path.glob("*packed*")) == []


@pytest.mark.parametrize(("n_experts", "shape"), [(0, (32, 1, 0)), (2, (0, 1, 2))])
def test_a_file_that_says_it_has_experts_and_has_none(tmp_path: Path, n_experts: int, shape: tuple[int, ...]) -> None:
    count = text(b"llama.expert_count") + struct.pack("<II", UINT32, n_experts)
    experts = tensor(b"blk.0.ffn_up_exps.weight", shape)
    (tmp_path / "none.gguf").write_bytes(container(count, 1, experts, 1))
    with pytest.raises(ModelFileError, match=r"llama\.cpp cannot load it"):
        pack(tmp_path / "none.gguf")


@pytest.mark.parametrize("how", ["replace", "write"])
def test_a_model_that_changes_while_it_is_packed_is_refused(model: Path, tmp_path: Path, how: str) -> None:
    """Else the old model's experts would have the new model's key."""
    other = make_model("qwen3moe", tmp_path, seed=1)

    def change(_: int, __: int) -> None:
        if how == "write":
            model.write_bytes(other.read_bytes())
        elif other.exists():
            other.replace(model)

    with pytest.raises(ModelFileError, match="changed while it was in use"):
        pack(model, progress=change)
    assert not list(tmp_path.glob("*packed*"))


def test_a_packed_file_that_changes_between_passes_is_told(model: Path) -> None:
    _changes_between_passes(model=model)


@in_child
def _changes_between_passes(model: Path) -> None:
    pack(model)
    with streaming_engine(model, packed=str(packed_path(model))) as engine:
        session = Session(engine.decoder)
        token = int(session.feed(PROMPT)[0].argmax())
        os.utime(packed_path(model))
        with pytest.raises(ModelFileError, match=r"packed: the file changed while it was in use"):
            session.step(token)


def test_a_packed_file_is_closed_where_the_opening_is_refused_later(model: Path) -> None:
    _is_refused(model=model)


@in_child
def _is_refused(model: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotSupported("not this one")

    pack(model)
    supply.chooser_of = refuse  # type: ignore[assignment]
    for _ in range(2):
        with (
            pytest.raises(NotSupported, match="not this one"),
            streaming_engine(model, packed=str(packed_path(model))),
        ):
            pass
        opened = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        assert str(packed_path(model)) not in opened


def test_nothing_stays_open_where_the_system_refuses_what_comes_after_the_packed_file(model: Path) -> None:
    _system_refuses(model=model)


@in_child
def _system_refuses(model: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # of no memory `open_at` would ask again

    pack(model)
    with streaming_engine(model, packed=str(packed_path(model))):
        pass
    before = set(os.listdir("/proc/self/fd"))
    assemble.ExpertCache = refuse  # type: ignore[assignment, misc]
    with (
        pytest.raises(TierReadError, match="temporarily unavailable"),
        streaming_engine(model, packed=str(packed_path(model))),
    ):
        pass
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_packed_file_that_is_replaced_while_the_model_opens_is_told(model: Path, tmp_path: Path) -> None:
    pack(model)
    found = find_packed(read_gguf(model), None)
    assert found
    pack(model, tmp_path / "again")
    (tmp_path / "again").replace(packed_path(model))
    with pytest.raises(ModelFileError, match="changed while it was in use"):
        PackedBlocks(found)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing(large: Path, tmp_path: Path, number: int, code: int) -> None:
    grown = tmp_path / "grown.gguf"
    grown.hardlink_to(large)
    words = [sys.executable, "-m", "edge_run", "pack", str(grown)]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which is ignored where the suite was started by nohup
    try:
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    with ending(process):
        wait_for(lambda: list(tmp_path.glob("*.part")))
        process.send_signal(number)
        _, notices = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in notices) == (code, False)
    assert [path.name for path in tmp_path.iterdir()] == [grown.name]
