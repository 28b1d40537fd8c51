"""A part of a model on a GPU: its bytes get there, budgets are kept, and the logits are llama.cpp's with the same part.

Each test runs in a child process, whose memory it may look at.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import pytest

from edge_run import BudgetError, TierReadError, probe
from edge_run.base.config import ModelConfig
from edge_run.base.units import MIB
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.gpu import offload
from edge_run.runtime.gpu.devices import SOFTWARE, PinnedStaging, find_gpus, measure_upload, open_staging
from edge_run.runtime.gpu.loading import gpu_tensors
from edge_run.runtime.gpu.offload import plan_offload
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.planning.offload_times import LEAST_PACES, known_paces, note_paces
from edge_run.runtime.probing import probe as probing
from edge_run.runtime.speculation.drafting import Acceptance, WantedGuesses
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.source import SourceFile
from edge_run.tiers.upload import STAGING_BYTES
from gpu_pairs import OPTIONS, differing, logits_of, offloads, open_engine, smallest, tokens_of
from in_child import in_child
from sabotage import sabotage
from tiny_models import make_model

ALONE: dict[str, Any] = {"op_offload": False}
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def held(tensor: int, length: int) -> bytes:
    """The bytes of a tensor on the GPU."""
    memory = ctypes.create_string_buffer(length)
    ggml.get_tensor(tensor, ctypes.addressof(memory), 0, length)
    return memory.raw


@in_child
def test_what_a_gpu_is() -> None:
    first = find_gpus()[0]
    assert 0 < first.free_bytes <= first.total_bytes
    assert measure_upload(first) > 10e6


class Unreadable:
    """A file that cannot be read into this memory, as a drive does not write to a driver's own pages."""

    def read_into(self, address: int, length: int, offset: int) -> int:
        raise TierReadError("Bad address")


@in_child
def test_uploads_go_through_pinned_memory_where_files_can_be_read_into_it(folder: Path) -> None:
    gpu = find_gpus()[0]
    with contextlib.closing(SourceFile(make_model("llama", folder))) as source:
        pinned = open_staging(gpu, source)
        assert isinstance(pinned, PinnedStaging)
        assert pinned.address % 4096 == 0
        assert source.read_into(pinned.address, STAGING_BYTES, 0) > 4096
        pinned.close()
        pinned.close()
    plain = open_staging(gpu, Unreadable())
    assert not isinstance(plain, PinnedStaging)
    plain.close()


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3", "jamba"])
def test_logits_are_those_of_llama_cpp_with_the_same_part(name: str, folder: Path) -> None:
    """Whole in memory, and streamed in as little as works: experts, also where the GPU has all else.

    Without op offload, which a mixture has only where all of it is in memory, so that its numerics key would differ.
    jamba has state instead of keys, gemma3 has a tensor twice. Where the processor plays the GPU, jamba's experts stay
    in DRAM: with them there llama.cpp ends with a segmentation fault after a few openings, with its own loader, under
    our settings, too.
    """
    _logits_are_the_same(path=make_model(name, folder), is_moe="moe" in name, is_frail=name == "jamba")


@in_child
def _logits_are_the_same(path: Path, is_moe: bool, is_frail: bool) -> None:
    choices = offloads(path, 4, **ALONE)
    if is_frail and choices[0].gpu.kind == SOFTWARE:
        narrow = (c for c in offloads(path, 40, **ALONE) if c.placement.n_narrow == max(0, c.placement.n_layers - 1))
        choices = list(narrow)[::2]
    assert len(choices) > 2
    if is_moe:
        choices.append(
            next(c for c in offloads(path, 40, **ALONE) if c.placement.n_narrow == c.placement.n_layers - 1 > 2)
        )
    modes, hit_rates = set(), []
    for choice in choices:
        budget = choice.sizes.total_bytes
        with open_engine(path, budget, backend="llama.cpp", **ALONE) as engine:
            wanted = logits_of(engine)
            key = engine.numerics
        assert choice.gpu.name in key.gpu
        for memory in (None, 0):
            with open_engine(path, budget, memory, **ALONE) as engine:
                assert engine.numerics == key
                assert differing(wanted, logits_of(engine)) == 0
                assert engine.plan.gpu
                assert engine.plan.gpu.layers == choice.placement.n_layers
                modes.add(engine.plan.mode)
                if engine.expert_use:
                    hit_rates.append(engine.expert_use.hit_rate)
    assert modes == {"resident", "streamed"}
    assert not is_moe or 0 < max(hit_rates) < 1


@in_child
def test_every_byte_on_the_gpu_is_the_files(folder: Path) -> None:
    """Also of a tensor that is there and in DRAM too: gemma3's tokens are its output."""
    path = make_model("gemma3", folder)
    data, places = path.read_bytes(), {tensor.name: tensor for tensor in read_gguf(path).tensors}
    with open_engine(path, 1 << 40) as engine:
        logits_of(engine)
        tensors = gpu_tensors(engine.model)
        assert len(tensors) > 20
        for tensor in tensors:
            place = places[ggml.tensor_name(tensor).decode()]
            assert held(tensor, place.size_bytes) == data[place.offset : place.offset + place.size_bytes], place.name
        assert engine.read_totals.bytes_read < 2 * len(data)


@in_child
def test_after_reads_that_fail_the_logits_are_right(folder: Path) -> None:
    path = make_model("llama", folder)
    (choice, *_) = offloads(path, 1)[-1:]
    with open_engine(path, choice.sizes.total_bytes, backend="llama.cpp") as engine:
        wanted = logits_of(engine)
    saboteur = sabotage()
    with open_engine(path, choice.sizes.total_bytes, 0) as engine:
        saboteur.set(0, 6)  # those ahead of need are tried again, and nobody is told
        n_failures = 0
        for _ in range(10):
            try:
                found = logits_of(engine)
                break
            except TierReadError:
                n_failures += 1
                engine.decoder.rewind(0, 0)
        assert n_failures
        assert differing(wanted, found) == 0


@in_child
def test_neither_budget_is_exceeded_in_a_process_that_has_just_begun(folder: Path) -> None:
    """Where the driver has compiled nothing yet."""
    path = make_model("llama", folder)
    _budgets_are_kept(path, offloads(path, 5)[2].sizes.total_bytes, 0.5)


@in_child
def test_neither_budget_is_exceeded_at_ten_pairs(folder: Path) -> None:
    path = make_model("llama", folder)
    choices = offloads(path, 10)
    for step in range(10):
        _budgets_are_kept(path, choices[step % len(choices)].sizes.total_bytes, step / 9)


def _budgets_are_kept(path: Path, gpu_memory: int, share: float) -> None:
    """share: of the model, what the budget of memory has above the smallest that works."""
    with open_engine(path, gpu_memory, 0) as engine:
        logits_of(engine)
        held, least = process_memory(), engine.budget_bytes
        assert held.resident_bytes <= least, f"{held} of {least}"
    with open_engine(path, gpu_memory, 0) as engine:  # the driver keeps memory when a model is closed
        least = engine.budget_bytes
    memory = least + int(share * path.stat().st_size)
    with open_engine(path, gpu_memory, memory) as engine:
        logits_of(engine)
        plan = engine.plan
        assert plan.gpu
        assert sum(item.size_bytes for item in plan.items) <= memory
        assert plan.gpu.weights_bytes + plan.gpu.kv_bytes + plan.gpu.buffer_bytes <= gpu_memory
        taken = ggml.allocated_bytes(gpu_tensors(engine.model))
        assert (taken, plan.gpu.budget_bytes) == (plan.gpu.weights_bytes, gpu_memory)
        assert process_memory().resident_bytes <= memory


@in_child
def test_the_smallest_that_a_refusal_names_works(folder: Path) -> None:
    path = make_model("llama", folder)
    least = smallest(path)
    with open_engine(path, least) as engine:
        assert engine.plan.gpu
        assert engine.plan.gpu.layers >= 1
    with pytest.raises(BudgetError, match="or give 0 to leave the GPU out"), open_engine(path, 1):
        pass
    with open_engine(path, 0) as engine:
        assert engine.plan.gpu is None
        assert engine.numerics.gpu == ""


@in_child
def test_where_llama_cpp_takes_more_than_it_said_less_goes_there(folder: Path) -> None:
    """As for caches that are not the same in every layer."""
    path = make_model("llama", folder)
    choice = offloads(path, 5)[2]
    real = offload.LlamaContext

    def modest(model: object, shape: object) -> object:
        context = real(model, shape)  # type: ignore[arg-type]
        context.gpu_buffer_bytes //= 2
        return context

    offload.LlamaContext = modest  # type: ignore[assignment, misc]
    with open_engine(path, choice.sizes.total_bytes - choice.sizes.buffer_bytes // 2) as engine:
        gpu = engine.plan.gpu
        assert gpu
        assert gpu.layers <= choice.placement.n_layers
        assert gpu.weights_bytes + gpu.kv_bytes + gpu.buffer_bytes <= gpu.budget_bytes
        logits_of(engine)


@in_child
def test_a_draft_model_on_the_gpu_guesses_what_it_would_say(folder: Path) -> None:
    """All of it is there, beside a part of the model, which here is the same one: so its best guess comes true."""
    path = make_model("llama", folder)
    with open_engine(path, 24 * MIB, draft=path, sequences=1, draft_tokens=4) as engine:
        gpu, draft = engine.plan.gpu, engine.draft
        assert gpu
        assert draft
        tensors = gpu_tensors(draft.model)
        assert 0 < ggml.allocated_bytes(tensors) < gpu.draft_bytes
        assert len(tensors) > len(gpu_tensors(engine.model)) > 0
        assert gpu.draft_bytes + gpu.weights_bytes + gpu.kv_bytes + gpu.buffer_bytes <= 24 * MIB
        tokens = tokens_of(engine)
        best = int(logits_of(engine)[-1][-1].argmax())
        guesses = draft.draft_many({0: tokens}, WantedGuesses(2, 8, Acceptance()))[0]
        assert max(guesses, key=lambda path: guesses[path].value if len(path) == 1 else 0.0) == (best,)


@in_child
def test_ten_engines_one_after_the_other_leave_nothing(folder: Path) -> None:
    path = make_model("llama", folder)
    (choice, *_) = offloads(path, 3)[1:]

    def once() -> tuple[int, int]:
        with open_engine(path, choice.sizes.total_bytes, 0) as engine:
            logits_of(engine)
        return find_gpus()[0].free_bytes, Path("/proc/self/maps").read_text().count("\n")

    once()
    free, n_maps = once()
    for _ in range(8):
        after = once()
    assert after[0] >= free
    assert after[1] <= n_maps + 20


@in_child
def test_measured_times_decide_how_much_of_an_moe_is_there_and_runs_correct_them(folder: Path) -> None:
    probing.MODEL_TOKENS = probing.EXPERT_TOKENS = (1,)  # type: ignore[assignment]
    path = make_model("deepseek2", folder)
    cache, gpu_memory = folder / "times", 1 << 30
    options = {"cache_folder": cache, "check_file": True}
    largest = plan_offload(read_gguf(path), ModelConfig(**OPTIONS, gpu_memory=gpu_memory), 1 << 40).model
    assert largest
    with open_engine(path, gpu_memory, **options) as engine:
        assert engine.offload
        assert engine.offload.placement == largest.placement, "nothing was measured yet"
        assert engine._passes.times is None
    probe(model=path, config=ModelConfig(gpu_memory=gpu_memory, threads=1, cache_folder=cache))
    placements = []
    for _ in range(2):
        with open_engine(path, gpu_memory, **options) as engine:
            assert engine.offload
            assert engine._passes.times, "so that tokens are held against it"
            placements.append(engine.offload.placement)
            tokens = tokens_of(engine)
            session = Session(engine.front)
            session.feed(tokens[:4])
            for token in tokens:
                session.step(token)
            part = engine.offload.part
        assert part in known_paces(engine.gguf, cache)
        note_paces(engine.gguf, cache, part, [1e6] * LEAST_PACES)  # as if that GPU were busy now
    assert len(set(placements)) == 2, "the other one is faster than that"
    narrow = max(placements, key=lambda placement: placement.n_narrow)
    assert largest.placement in placements
    assert narrow.n_narrow == narrow.n_layers - 1
