"""How fast llama.cpp's kernels are on this device: ggml graphs of what a model's layers consist of, timed.

Weights lie as in a streamed run: in memory that asks for huge pages, in the layout of the file (nothing repacked); or
in a GPU's. What a pass takes follows from these figures: weights by speed for each type and length of rows, attention,
gates, nodes. Not covered: element-wise work other than the gate, which is small beside the weights.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from edge_run.base.errors import ConfigError, NotSupported
from edge_run.base.profile import KernelSpeed, RepackedSpeed
from edge_run.base.units import MIB
from edge_run.devices.host.machine import describe_machine, usable_cpus
from edge_run.devices.host.memory import available_bytes, process_memory
from edge_run.runtime.llama import _ggml
from edge_run.runtime.llama.holdings import repacking_bytes
from edge_run.runtime.llama.repacking import Repacking, groups_of
from edge_run.runtime.probing.workbench import (
    ALIGNMENT_BYTES,
    GpuBench,
    Workbench,
    apart,
    measure_in_turn,
    workbench,
)
from edge_run.runtime.probing.workload import AttentionShape
from edge_run.tiers.gguf_format import F16, F32, TENSOR_TYPES, TensorType
from edge_run.tiers.residency import Residency

CACHES = Path("/sys/devices/system/cpu")
NARROW_TOKENS = 32  # up to this width the weights' way from DRAM can be what takes the time
NARROW_BYTES = 96 * MIB
BATCH_BYTES = 16 * MIB
CACHE_MULTIPLE = 3  # the weights of a pass are so many times the caches, so that none are still there
ROOM_SHARE = 1 / 4  # of the memory that this process may still take, for what a pass goes through
MATRICES = 4
EXPERTS = 8
I32 = 26
ROWS_MULTIPLE = 128  # as models have them; odd numbers are slower, few rows are shared out otherwise
LEAST_REPACK_S = 1e-6  # some systems count the time of a thread in steps that are longer
ATTENTION_LAYERS = 256
STOPS, STOP_NODES, STOP_CHUNKS = 200, 10, 4
NODES, NODE_ELEMENTS = 512, 320
PATTERN_ELEMENTS = 4096
PRECISION_F32 = 10  # as llama.cpp asks of attention
NO_KERNEL = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}  # results of conversions, ids: never weights
GRID_TYPES = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}
IQ1_M_SCALES = slice(49, None, 2)  # the bytes of a block that have a fourth of its scale each, in their upper half


def has_repacked_kernel(type_name: str, row_elements: int, by_expert: bool) -> bool:
    """Return whether weights of a type can be repacked for a kernel of this processor."""
    type_ids = [type_id for type_id, kind in TENSOR_TYPES.items() if kind.name == type_name]
    shape = (row_elements, ROWS_MULTIPLE, EXPERTS if by_expert else 1)
    return bool(groups_of((type_id, shape, by_expert) for type_id in type_ids))


def measure_repacked(
    type_name: str, row_elements: int, tokens: int, threads: int, by_expert: bool = False
) -> tuple[KernelSpeed, RepackedSpeed]:
    """Return what `measure_matmul` does, and how fast the same weights are repacked, and multiplied then.

    Both are measured in turn, as which is faster decides what runs do. Takes twice the time and memory of one. Raises
    NotSupported without a kernel.
    """
    kind = type_name, row_elements, tokens, threads, by_expert
    repacking = Repacking()
    try:
        with _ggml.log.listening(lambda line: None):  # a line for each slice that is repacked
            plain, repacked = _measure(*kind, repackings=(None, repacking))
    finally:
        repacking.close()
    return KernelSpeed(*kind, plain.bytes_per_s), RepackedSpeed(*kind, *dataclasses.astuple(repacked))


def measure_matmul(
    type_name: str,
    row_elements: int,
    tokens: int,
    threads: int,
    by_expert: bool = False,
    gpu: GpuBench | None = None,
) -> KernelSpeed:
    """Return how fast `threads` threads multiply weights of a type, as `Q4_0`, with `tokens` tokens in a pass.

    by_expert: as in a mixture of experts, several experts with `tokens` tokens each. gpu: which does it instead.

    Takes about half a second, and as memory what a pass goes through (`narrow_bytes`, 16 MiB for wide ones) and 9 bytes
    for each element of the activations, `(tokens, row_elements)`. Raises NotSupported for a type that cannot be
    multiplied, ConfigError for figures that cannot be.
    """
    (speed,) = _measure(type_name, row_elements, tokens, threads, by_expert, gpu)
    return KernelSpeed(type_name, row_elements, tokens, threads, by_expert, speed.bytes_per_s)


@dataclass(frozen=True, slots=True)
class _Speed:
    """The bytes of weights that are multiplied a second, and those that a core repacks."""

    bytes_per_s: float
    repacked_bytes_per_s: float


@apart
def _measure(
    type_name: str,
    row_elements: int,
    tokens: int,
    threads: int,
    by_expert: bool,
    gpu: GpuBench | None = None,
    repackings: Sequence[Repacking | None] = (None,),
) -> list[_Speed]:
    """Return how fast the same weights are multiplied with each of `repackings`, measured in turn.

    repackings: which give the weights repacked kernels; None leaves them as they are. Else see `measure_matmul`.
    """
    type_id, kind = _weight_type(type_name)
    for name, figure in (("row_elements", row_elements), ("tokens", tokens), ("threads", threads)):
        if figure < 1:
            raise ConfigError(f"{name} is {figure}; it must be 1 or more")
    if row_elements % kind.block_elements:
        raise ConfigError(f"{type_name} rows are multiples of {kind.block_elements} elements, not {row_elements}")
    row_bytes = kind.size_bytes(row_elements)
    wanted_bytes = _pass_bytes(tokens, gpu)
    rows = max(1, round(wanted_bytes / (MATRICES * ROWS_MULTIPLE * row_bytes))) * ROWS_MULTIPLE
    matrices = max(1, round(wanted_bytes / (rows * row_bytes)))
    size_bytes = matrices * rows * row_bytes
    arena_bytes = size_bytes + 4 * tokens * (row_elements + rows) + 4 * EXPERTS * tokens
    with ExitStack() as stack:
        benches, repack_s = [], []
        for repacking in repackings:
            bench = stack.enter_context(workbench(threads, arena_bytes, matrices, gpu))
            n_experts = EXPERTS if by_expert else 1
            weights = [bench.tensor(type_id, row_elements, rows // n_experts, n_experts) for _ in range(matrices)]
            bench.fill(weights, _pattern(type_id))
            repack_s.append(_repack_s(repacking, weights, type_name, by_expert=by_expert) if repacking else 0.0)
            _multiply(bench, weights, (row_elements, rows, tokens), by_expert=by_expert)
            benches.append(bench)
        pass_s = measure_in_turn(*benches)
    return [
        _Speed(size_bytes / taken_s, size_bytes / ready_s if ready_s else math.inf)
        for taken_s, ready_s in zip(pass_s, repack_s, strict=True)
    ]


def _multiply(bench: Workbench, weights: Sequence[int], shape: tuple[int, int, int], *, by_expert: bool) -> None:
    """Let the graph of `bench` multiply each of `weights` with activations; shape: elements of a row, rows, tokens."""
    row_elements, rows, tokens = shape
    activations = bench.tensor(F32, row_elements, 1, tokens) if by_expert else bench.tensor(F32, row_elements, tokens)
    bench.fill([activations], _pattern(F32))
    n_experts = EXPERTS if by_expert else 1
    chosen = bench.tensor(I32, n_experts, tokens)
    bench.fill([chosen], np.arange(n_experts, dtype=np.int32).view(np.uint8))
    room = bench.reserve(4 * tokens * rows)
    for matrix in weights:
        if by_expert:
            bench.node(bench.ggml.ggml_mul_mat_id(bench.context, matrix, activations, chosen), room)
        else:
            bench.node(bench.ggml.ggml_mul_mat(bench.context, matrix, activations), room)


def _repack_s(repacking: Repacking, weights: Sequence[int], type_name: str, *, by_expert: bool) -> float:
    """Repack the `weights` of a type, and return how long a core takes. Raises NotSupported where none has a kernel."""
    repack_s = 0.0
    for weight in weights:
        tensor = _ggml.tensor_at(weight)
        kernel = repacking.kernel(tensor.type, tuple(tensor.ne[:3]), by_expert=by_expert)
        if not kernel:
            raise NotSupported(f"{type_name}, rows of {tensor.ne[0]}: llama.cpp has no kernel for it repacked here")
        repacked = repacking.mark(weight, kernel)
        copy = np.zeros(repacking_bytes(repacked.group_bytes), np.uint8)
        started = time.thread_time()
        repacked.repack(repacked.address, repacked.size_bytes, copy.ctypes.data)
        repack_s += time.thread_time() - started
    return max(repack_s, LEAST_REPACK_S)


@apart
def measure_attention(
    tokens: int,
    shape: AttentionShape,
    threads: int,
    gpu: GpuBench | None = None,
    types: tuple[str, str] = ("f16", "f16"),
    budget_bytes: int | None = None,
) -> float:
    """Return the floating point operations a second of flash attention, on keys and values of `types`.

    budget_bytes: what this process may hold, as in `narrow_bytes`.

    Counts 4 for each of `tokens * kv_tokens * head_elements * heads`: every token sees every key; those that a causal
    mask hides cost next to nothing and are not to be counted.
    """
    kv_tokens, head_elements, heads, kv_heads = dataclasses.astuple(shape)
    kv_elements = head_elements * kv_heads * kv_tokens
    layers = 1
    if tokens <= NARROW_TOKENS:
        layers = min(ATTENTION_LAYERS, max(1, _pass_bytes(tokens, gpu, budget_bytes) // (4 * kv_elements)))
    kinds = [_ggml.TYPE_IDS[name] for name in types]
    kv_bytes = sum(TENSOR_TYPES[kind].size_bytes(kv_elements) for kind in kinds)
    arena_bytes = kv_bytes * layers + 8 * head_elements * heads * tokens + 2 * kv_tokens * tokens
    with workbench(threads, arena_bytes, layers, gpu) as bench:
        ggml, context = bench.ggml, bench.context
        keys_values = [bench.tensor(kind, head_elements, kv_heads, kv_tokens) for _ in range(layers) for kind in kinds]
        queries = bench.tensor(F32, head_elements, heads, tokens)
        mask = bench.tensor(F16, kv_tokens, tokens)
        for tensors, kind in zip((keys_values[::2], keys_values[1::2]), kinds, strict=True):
            bench.fill(tensors, _pattern(kind))
        bench.fill([queries], _pattern(F32))
        bench.fill([mask], np.zeros(1, np.uint8))
        room = bench.reserve(4 * head_elements * heads * tokens)
        # As in llama.cpp's graphs: a token's heads lie side by side, and views turn that around.
        q, *kv = [bench.view(ggml.ggml_permute(context, tensor, 0, 2, 1, 3)) for tensor in (queries, *keys_values)]
        for k, v in zip(kv[::2], kv[1::2], strict=True):
            node = ggml.ggml_flash_attn_ext(context, q, k, v, mask, 1 / math.sqrt(head_elements), 0.0, 0.0)
            ggml.ggml_prec_set_acc(node, PRECISION_F32)
            bench.node(node, room)
        pass_s = bench.measure_s()
    return 4 * tokens * kv_tokens * head_elements * heads * layers / pass_s


@apart
def measure_node_s(threads: int, gpu: GpuBench | None = None) -> float:
    """Return the seconds that a node of a graph costs besides its work: threads meet at a barrier after each.

    Two kinds of nodes by turns: of one kind, kernels of GPUs compute several at once.
    """
    with workbench(threads, (NODES + 2) * (4 * NODE_ELEMENTS + ALIGNMENT_BYTES), NODES, gpu) as bench:
        total, term = (bench.tensor(F32, NODE_ELEMENTS, 1) for _ in range(2))
        bench.fill([total, term], np.zeros(1, np.uint8))
        for number in range(NODES):
            node = bench.ggml.ggml_mul if number % 2 else bench.ggml.ggml_add
            total = node(bench.context, total, term)
            bench.node(total, bench.reserve(4 * NODE_ELEMENTS))
        return bench.measure_s() / NODES


@apart
def measure_stop_s(threads: int) -> float:
    """Return the seconds that a stop of a streamed pass costs.

    That is a call of ggml's, the callbacks of the nodes up to it, and taking weights and giving them back.
    """
    held = [range(start, start + STOP_CHUNKS) for start in range(0, 4 * STOP_CHUNKS, STOP_CHUNKS)]
    chunks = range(4 * STOP_CHUNKS)
    state = Residency(len(chunks), chunks, (), 2 * STOP_CHUNKS)
    names: set[bytes] = set()

    def ask(address: int, is_asking: bool, _: int) -> bool:
        names.add(_ggml.tensor_name(address))
        return is_asking

    def take(step: int) -> None:
        loads = state.release(held[step % 4]) + state.acquire(held[(step + 1) % 4])
        while loads:
            loads = [more for load in loads for more in state.loaded(load.chunk)]

    callback = _ggml.EvalCallback(ask)
    with workbench(threads, 4096, 1) as bench:
        total, term = (bench.tensor(F32, 1, 1) for _ in range(2))
        node = bench.ggml.ggml_add(bench.context, total, term)
        bench.node(node, bench.reserve(4))
        times = []
        for step in range(STOPS):
            started = time.perf_counter()
            for _ in range(STOP_NODES):
                callback(node, True, None)
            take(step)
            bench.compute_s()
            times.append(time.perf_counter() - started)
    return sorted(times)[STOPS // 10]  # others that are at work would be most of the median


def narrow_bytes(budget_bytes: int | None = None) -> int:
    """Return how much a narrow pass goes through: more than the caches hold, where there is room for it.

    Halved until it fits in its share of the room, so that runs with about the same room measure the same.

    budget_bytes: what this process may hold; None for all that is available to it.
    """
    return _narrow_bytes(min(available_bytes(), budget_bytes or sys.maxsize))


def lacks_room(tokens: int) -> bool:
    """Return whether memory is so short now that the caches hold all that a pass of `tokens` tokens would go through.

    Where this process could never have more, it is not: what is measured then is what can be.
    """
    machine = describe_machine()
    most_bytes = machine.memory_limit_bytes or machine.memory_bytes
    return tokens <= NARROW_TOKENS and narrow_bytes() <= last_cache_bytes() < _narrow_bytes(most_bytes)


def _narrow_bytes(limit_bytes: int) -> int:
    wanted_bytes = _wanted_bytes()
    room_bytes = ROOM_SHARE * (limit_bytes - process_memory().resident_bytes)
    while wanted_bytes > max(BATCH_BYTES, room_bytes):
        wanted_bytes = max(BATCH_BYTES, wanted_bytes // 2)
    return wanted_bytes


def _pass_bytes(tokens: int, gpu: GpuBench | None, budget_bytes: int | None = None) -> int:
    """Return how much a pass goes through; on a GPU with memory of its own the machine's room does not limit it."""
    if tokens > NARROW_TOKENS:
        size_bytes = BATCH_BYTES
    else:
        size_bytes = _wanted_bytes() if gpu and gpu.has_own_memory else narrow_bytes(budget_bytes)
    return size_bytes // (gpu.slowness if gpu else 1)


def _wanted_bytes() -> int:
    return max(NARROW_BYTES, CACHE_MULTIPLE * last_cache_bytes())


def last_cache_bytes(root: Path = CACHES, cpus: Collection[int] | None = None) -> int:
    """Return the size of the last level of cache, all parts of it; 0 where the kernel does not say.

    cpus: the processors whose caches count, by default those that this process may use.
    """
    caches: dict[tuple[int, str], int] = {}
    cpus = usable_cpus() if cpus is None else cpus
    for folder in (folder for cpu in cpus for folder in root.glob(f"cpu{cpu}/cache/index*")):
        try:
            level, shared, size = ((folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
            caches[int(level), shared] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue  # a virtual machine may name only some
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


def _weight_type(name: str) -> tuple[int, TensorType]:
    for type_id, kind in TENSOR_TYPES.items():
        if kind.name == name and name not in NO_KERNEL:
            return type_id, kind
    raise NotSupported(f"{name}: llama.cpp has no kernel that multiplies weights of this type on the CPU")


def _pattern(type_id: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a few thousand random numbers of a type; no scale among them is zero, denormal or NaN."""
    random, kind = default_rng(1), TENSOR_TYPES[type_id]
    if kind.name not in GRID_TYPES:
        values = random.standard_normal(PATTERN_ELEMENTS, np.float32)
        return _ggml.quantize(type_id, values, kind.size_bytes(PATTERN_ELEMENTS))
    # Quantising to these takes seconds to prepare, and every code of theirs is valid: only the scales matter.
    blocks = random.integers(0, 256, (PATTERN_ELEMENTS // kind.block_elements, kind.block_bytes), np.uint8)
    if kind.name == "IQ1_M":
        blocks[:, IQ1_M_SCALES] = blocks[:, IQ1_M_SCALES] & 0x0F | 0x20
    else:
        blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
    return blocks.reshape(-1)
