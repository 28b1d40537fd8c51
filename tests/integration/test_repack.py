"""Repacked weights: llama.cpp's default bits on memory of ours, inside the budget. Comparisons are child processes."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from default_kernels import needs_default_kernels
from edge_run import ModelConfig, NotSupported, plan
from edge_run.base.config import CHUNK_BYTES
from edge_run.base.errors import PackedFileError
from edge_run.base.profile import KernelSpeed, RepackedSpeed
from edge_run.base.protocols import BatchToken
from edge_run.base.units import KIB
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.profile import KernelFigure, Measurements, ProfileStore, RepackedFigure
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.decoding.repacked_weights import RepackedWeights
from edge_run.runtime.decoding.short_pass import map_short_pass
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.graph.segments import ROW_GROUP
from edge_run.runtime.llama.context_shape import context_shape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.runtime.llama.repacking import MOST_ROWS_TOGETHER, groups_of, types_with_kernels
from edge_run.runtime.planning.prepare import prepare
from edge_run.runtime.planning.repack_choice import choose_kinds
from edge_run.runtime.probing.kernels import measure_repacked
from edge_run.runtime.probing.workload import measured_now, this_setup
from edge_run.runtime.speculation.drafting import Acceptance, WantedGuesses
from edge_run.runtime.tools.pack import pack
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.packed_file import packed_path
from exactness import open_at
from in_child import in_child, run_script
from kit_models import KIT
from program import run_program
from talks import OPTIONS, SEQUENCES, VERIFIED, Talk, check_rows, say, say_in_branches
from tiny_models import make_model

SCRIPT = Path(__file__).resolve().parents[1] / "repacked.py"
Q4_0 = 2

DENSE = ["llama", "gemma3", "phi3", "granite", "gpt2", "hrm_text", "falcon-h1"]
MOE_MODELS = ["qwen3moe", "deepseek2", "gpt-oss", "glm4moe"]
STATEFUL = ["mamba", "rwkv7", "jamba"]


pytestmark = [
    needs_default_kernels,
    pytest.mark.skipif("Q4_0" not in types_with_kernels(), reason="no kernel for repacked weights on this processor"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this module are made."""
    return tmp_path_factory.mktemp("models")


def compare(path: Path, cache: Path, *arguments: str, mode: str = "resident") -> list[dict[str, Any]]:
    """Return the runs of a comparison, which all gave llama.cpp's logits inside their budgets."""
    done = run_script(SCRIPT, str(path), str(cache), *arguments)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"
    runs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["runs"]
    for run in runs:
        assert run["mode"] == mode
        assert run["different_rows"] == 0
        assert run["peak_bytes"] <= run["budget_bytes"]
        assert run["repacked"] == ", ".join(run["planned"])
    assert mode != "resident" or runs[1]["budget_bytes"] < runs[0]["budget_bytes"]
    for run in runs:
        assert bool(run["planned_bytes"]) is bool(run["repacked"])
    return runs


def stream(path: Path, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the streamed runs of a comparison; `compare` says what they have in common."""
    runs = compare(path, cache, "--streamed", *arguments, mode="streamed")
    assert all(run["streamed_bytes"] > 0 for run in runs[:-1])  # memory that is lent may hold the rest in the last one
    return runs


@pytest.mark.parametrize("name", DENSE + MOE_MODELS + STATEFUL)
def test_logits_are_those_of_the_default(name: str, folder: Path, tmp_path: Path) -> None:
    for run in compare(make_model(name, folder, quantisation="Q4_0"), tmp_path):
        assert "Q4_0/256" in run["repacked"] or "Q4_0/512" in run["repacked"]
        assert ("experts" in run["repacked"]) is (name in [*MOE_MODELS, "jamba"])
        assert not run["as_plain"], "the kernels differ in the last bits, or nothing was compared"


@pytest.mark.parametrize("name", DENSE + MOE_MODELS + STATEFUL)
def test_weights_that_stream(name: str, folder: Path, tmp_path: Path) -> None:
    """Most chunks of 32 KiB begin and end in the middle of rows that are interleaved; experts stream one by one."""
    by_expert = ["--by-expert"] if name in MOE_MODELS else []
    runs = stream(make_model(name, folder, quantisation="Q4_0"), tmp_path, *by_expert)
    for run in runs:
        assert "Q4_0/256" in run["repacked"] or "Q4_0/512" in run["repacked"]
        assert ("experts" in run["repacked"]) is (name in [*MOE_MODELS, "jamba"])
        assert not run["as_plain"], "the kernels differ in the last bits, or nothing was compared"
    assert not by_expert or all(run["expert_bytes"] > 0 for run in runs[1:])


@pytest.mark.parametrize(("name", "arguments"), [("llama", ()), ("qwen3moe", ("--by-expert",))])
def test_weights_that_stream_in_chunks_of_the_size_that_runs_have(
    name: str, arguments: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    path = make_model(name, folder, scale=16, quantisation="Q4_0")
    for run in stream(path, tmp_path, "--chunk-kib", str(CHUNK_BYTES // KIB), "--threads", "2", *arguments):
        assert run["repacked"]
        assert not run["as_plain"]


def test_experts_that_are_unpacked_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_run.runtime.tools.pack.MOST_SHARE", 1.0)  # random weights are not worth it
    path = make_model("qwen3moe", folder, scale=4, quantisation="Q4_0")
    made = pack(path, tmp_path / "packed", is_overwritten=True)
    runs = stream(path, tmp_path, "--by-expert", "--packed", str(made.path))
    assert all("experts" in run["repacked"] for run in runs)
    assert any(run["unpacked"] for run in runs)


@pytest.mark.parametrize("scale", [1, 16])
def test_weights_that_are_read_repacked(scale: int, folder: Path, tmp_path: Path) -> None:
    """Of the first model each block has rows of several matrices; of the second a matrix has many blocks."""
    path = make_model("llama", folder, scale=scale, quantisation="Q4_0")
    made = pack(path, tmp_path / "packed")
    assert made.repacked
    for run in stream(path, tmp_path, "--packed", str(made.path)):
        assert run["repacked"] == ", ".join(made.repacked)
        assert run["read_repacked"]
        assert not run["as_plain"]


def test_a_file_that_was_repacked_for_other_kernels_is_left_alone(folder: Path, tmp_path: Path) -> None:
    path = make_model("llama", folder, quantisation="Q4_0")
    gguf, target = read_gguf(path), packed_path(path)
    config = ModelConfig(repack="on", memory="1GiB", cache_folder=tmp_path, check_file=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge_run.runtime.tools.pack_repacked.layout_of", lambda weights: "0" * 64)
        pack(path)
    try:
        assert prepare(gguf, config, is_opened=False).repacked_file is None
        with pytest.raises(PackedFileError, match=r"the kernels of another processor.*edge-run pack"):
            prepare(gguf, replace(config, packed=target), is_opened=False)
        pack(path, is_overwritten=True)
        for asked in ("on", "auto"):
            prepared = prepare(gguf, replace(config, repack=asked), is_opened=False)
            assert prepared.repacked_file is not None
            assert prepared.repacked_streamed >= {"Q4_0/256", "Q4_0/768"}, "though nothing was measured"
        for left in (replace(config, repack="off"), replace(config, packed="off")):
            assert prepare(gguf, left, is_opened=False).repacked_file is None
    finally:
        target.unlink()


@pytest.mark.parametrize("quantisation", ["Q4_K_M", "IQ4_NL", "Q8_0"])
def test_types_that_stream(quantisation: str, folder: Path, tmp_path: Path) -> None:
    has_kernel = quantisation.removesuffix("_M") in types_with_kernels()
    for run in stream(make_model("llama", folder, quantisation=quantisation), tmp_path):
        assert bool(run["repacked"]) is has_kernel
        assert run["as_plain"] is not has_kernel


@pytest.mark.parametrize("options", [{}, {"exact": True, "flash_attention": "off"}, {"sequences": SEQUENCES}], ids=str)
@in_child
def test_guesses_that_are_verified(options: dict[str, Any], folder: Path) -> None:
    """In a row, or in branches where there are sequences for it."""
    path, settings = make_model("llama", folder, quantisation="Q4_0"), {**OPTIONS, **options, "repack": "on"}
    script = say_in_branches if "sequences" in options else say
    engine = open_at(path, 0.1, settings, chunk_bytes=16 * KIB)
    assert engine.numerics.repacked
    found = Talk(engine.decoder)
    script(found)
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()
    check_rows(path, script, settings, found)


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_K_M"])
@in_child
def test_with_exact_no_bit_depends_on_the_width_of_passes(quantisation: str, folder: Path) -> None:
    """What has a kernel of which that is not so, as Q4_K on x86, is not repacked then; llama.cpp's loader refuses."""
    path = make_model("llama", folder, quantisation=quantisation)
    settings: dict[str, Any] = {**OPTIONS, "exact": True, "repack": "on"}
    engine = Engine.open(path, ModelConfig(**settings))
    talk = Talk(engine.decoder)
    talk.prompt(20)
    talk.verify(VERIFIED, 0)
    together = talk.rows[1]
    talk.step(VERIFIED)
    repacked = engine.numerics.repacked
    engine.close()
    assert np.array_equal(together, np.concatenate(talk.rows[-VERIFIED:]))
    gguf = read_gguf(path)
    wanted, even = (choose_kinds(gguf, replace(ModelConfig(repack="on"), exact=one)) for one in (False, True))
    uneven = wanted - even
    assert {kind.split("/")[0] for kind in uneven} <= {*types_with_kernels()}, "what has no kernel is not left out"
    assert bool(repacked) == any(kind.split("/")[0] in types_with_kernels() for kind in even)
    with pytest.raises(NotSupported, match=r"exact: .* leave out repack=") if uneven else nullcontext():
        Engine.open(path, ModelConfig(**settings, backend="llama.cpp")).close()


@pytest.mark.parametrize("quantisation", ["Q4_K_M", "IQ4_NL", "Q8_0"])
def test_types(quantisation: str, folder: Path, tmp_path: Path) -> None:
    name = quantisation.removesuffix("_M")
    runs = compare(make_model("llama", folder, quantisation=quantisation), tmp_path)
    has_kernel = name in types_with_kernels()
    assert all((name in run["repacked"]) is has_kernel for run in runs)
    assert all(run["as_plain"] is not has_kernel for run in runs)


def test_the_bundled_model_inspected_and_with_two_threads(tmp_path: Path) -> None:
    compare(KIT, tmp_path, "--check-file", "--threads", "2")


def _note_speeds(
    cache: Path,
    threads: int,
    gains: dict[int, float],
    *,
    is_disturbed: bool = False,
    repacked_bytes_per_s: float = 1e12,
) -> None:
    """Keep speeds of Q4_0 as measured: repacked, it is so many times as fast, by length of rows."""
    store = ProfileStore(cache)
    for row_elements, gain in gains.items():
        for tokens in (1, 64):
            plain = KernelSpeed("Q4_0", row_elements, tokens, threads, False, 1e9)
            repacked = RepackedSpeed("Q4_0", row_elements, tokens, threads, False, gain * 1e9, repacked_bytes_per_s)
            figures = (
                KernelFigure(measured_now(), is_disturbed, plain),
                RepackedFigure(measured_now(), is_disturbed, repacked, True),
            )
            store.save(this_setup(), Measurements(kernels=(figures[0],), repacked=(figures[1],)))


def test_auto_repacks_what_measured_faster(folder: Path, tmp_path: Path) -> None:
    """Held against llama.cpp with the other matrices kept as they are, by name."""
    _note_speeds(tmp_path, 1, {256: 1.5, 768: 0.8})
    path = make_model("llama", folder, quantisation="Q4_0")
    runs = compare(path, tmp_path, "--repack", "auto", "--plain", r"ffn_down\.weight")
    assert [run["repacked"] for run in runs] == ["Q4_0/256"] * 2


def test_auto_repacks_nothing_where_nothing_was_measured(folder: Path, tmp_path: Path) -> None:
    runs = compare(make_model("llama", folder, quantisation="Q4_0"), tmp_path, "--repack", "auto", "--plain", ".*")
    assert [(run["repacked"], run["as_plain"]) for run in runs] == [("", True)] * 2


def test_a_decision_stays_until_the_other_kernel_gains_a_tenth(folder: Path, tmp_path: Path) -> None:
    path = make_model("llama", folder, quantisation="Q4_0")

    def chosen() -> frozenset[str]:
        config = ModelConfig(threads=1, cache_folder=tmp_path, micro_batch_tokens=64, check_file=False)
        return prepare(read_gguf(path), config, is_opened=False).repacked

    _note_speeds(tmp_path, 1, {256: 1.05, 768: 1.2})
    assert chosen() == {"Q4_0/768"}
    _note_speeds(tmp_path, 1, {256: 1.2, 768: 0.95})
    assert chosen() == {"Q4_0/256", "Q4_0/768"}
    _note_speeds(tmp_path, 1, {256: 0.85, 768: 0.95})
    assert chosen() == {"Q4_0/768"}
    _note_speeds(tmp_path, 1, {256: 2.0, 768: 0.5}, is_disturbed=True)
    assert chosen() == {"Q4_0/768"}, "others were at work"
    (figures,) = (tmp_path / "profiles").iterdir()
    figures.unlink()
    assert chosen() == {"Q4_0/768"}, "figures grow old, a decision does not"


def test_auto_counts_what_repacking_costs_where_weights_stream(folder: Path, tmp_path: Path) -> None:
    path = make_model("llama", folder, quantisation="Q4_0")
    config = ModelConfig(threads=1, memory="1GiB", cache_folder=tmp_path, micro_batch_tokens=64, check_file=False)
    both = {"Q4_0/256", "Q4_0/768"}
    for repacked_bytes_per_s, packed, chosen in ((1e8, "off", set[str]()), (1e8, None, both), (1e11, "off", both)):
        _note_speeds(tmp_path, 1, {256: 1.5, 768: 1.5}, repacked_bytes_per_s=repacked_bytes_per_s)
        made = pack(path)
        prepared = prepare(read_gguf(path), replace(config, packed=packed), is_opened=False)
        made.path.unlink()
        assert prepared.repacked == both
        assert prepared.repacked_streamed == chosen


def test_pack_leaves_out_what_measured_slower_repacked(
    folder: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    path = make_model("llama", folder, quantisation="Q4_0")
    _note_speeds(tmp_path, compute_threads(None), {256: 1.5, 768: 0.8})
    done = run_program("pack", path, "-o", tmp_path / "packed", "--cache-dir", tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "repacked: Q4_0/256, " in done.stderr


def test_a_plan_says_what_a_run_repacks(folder: Path, tmp_path: Path) -> None:
    path = make_model("llama", folder, quantisation="Q4_0")
    options: dict[str, Any] = {"memory": "1GiB", "cache_folder": tmp_path, "context_tokens": 512}
    assert plan(path, repack="on", **options).repacked == ("Q4_0/256", "Q4_0/768")
    assert plan(path, repack="off", **options).repacked == ()
    assert plan(path, repack="auto", **options).repacked == ()


def test_devices_that_share_a_model_do_not_repack(folder: Path, tmp_path: Path) -> None:
    gguf = read_gguf(make_model("llama", folder, quantisation="Q4_0"))
    config = ModelConfig(cache_folder=tmp_path, repack="on", memory="1GiB")
    with pytest.raises(NotSupported, match="leave out repack= or mesh="):
        prepare(gguf, config, is_slice=True)


def test_weights_that_llama_read_are_repacked_where_they_lie(folder: Path) -> None:
    """As those of a draft model are."""
    path = make_model("llama", folder, quantisation="Q4_0")
    gguf, rows = read_gguf(path), []
    shape = context_shape(ModelConfig(context_tokens=64, micro_batch_tokens=32), 1024, threads=1)
    batch = [BatchToken(7 * i, i, 0, i == 19) for i in range(20)]
    for is_repacked in (True, False):
        with ExitStack() as stack:
            model = stack.enter_context(LlamaModel([path], mode="read", is_repacked=is_repacked))
            if not is_repacked:
                kinds = choose_kinds(gguf, ModelConfig(repack="on"))
                weights = RepackedWeights(model, gguf, map_short_pass(model, shape), kinds)
                stack.callback(weights.close)
                weights.repack_now()
                assert weights.kinds == ("Q4_0/256", "Q4_0/768")
            context = LlamaContext(model, shape)
            stack.callback(context.close)
            with closing(LocalDecoder(model, context, Driver(), shape)) as decoder:
                rows.append(decoder.decode(batch).copy())
    assert np.array_equal(*rows)


def test_a_draft_model_is_repacked_too(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model("llama", folder, quantisation="Q4_0")
    repacked: list[tuple[str, ...]] = []
    real = RepackedWeights.repack_now

    def repack_now(weights: RepackedWeights) -> None:
        real(weights)
        repacked.append(weights.kinds)

    monkeypatch.setattr(RepackedWeights, "repack_now", repack_now)
    config = ModelConfig(repack="on", draft=path, cache_folder=tmp_path, context_tokens=256, check_file=False)
    engine = Engine.open(path, config)
    try:
        assert repacked == [("Q4_0/256", "Q4_0/768")]
        assert engine.draft is not None
        guesses = engine.draft.draft_many({0: [1, 2, 3, 4]}, WantedGuesses(3, 8, Acceptance()))
        rows = engine.decoder.decode([BatchToken(token, i, 0, i == 3) for i, token in enumerate([1, 2, 3, 4])])
        assert (int(rows[-1].argmax()),) in guesses[0], "a model that drafts for itself guesses right"
    finally:
        engine.close()


def test_a_matrix_of_odd_size_has_no_kernel() -> None:
    assert set(groups_of([(Q4_0, (256, 128), False), (Q4_0, (256, 129), False)])) == {(Q4_0, (256, 128), False)}


def test_slices_of_rows_tear_no_group_apart() -> None:
    assert ROW_GROUP % MOST_ROWS_TOGETHER == 0
    assert all(MOST_ROWS_TOGETHER % rows == 0 for rows in types_with_kernels().values())


def test_the_speed_of_repacked_weights_is_measured() -> None:
    plain, repacked = measure_repacked("Q4_0", 256, 1, 1)
    assert 1e6 < plain.bytes_per_s < 1e12
    assert 1e6 < repacked.bytes_per_s < 1e12
    assert 1e6 < repacked.repacked_bytes_per_s < 1e12
    with pytest.raises(NotSupported, match=r"F16, rows of 256: llama\.cpp has no kernel"):
        measure_repacked("F16", 256, 1, 1)
