"""Forecasts of a plan's times on a measured device: the time to the first token, and the speed after it.

A pass takes as long as the slower of computing and reading, which overlap. The first pass reads everything, into memory
that was not used before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from edge_run.base.config import CHUNK_BYTES
from edge_run.base.profile import DeviceProfile, DiskProfile, GpuProfile
from edge_run.base.results import Forecast, Plan
from edge_run.partition.cost import (
    NO_WINDOW,
    AttentionWindow,
    CostModel,
    GpuWork,
    MatmulWork,
    PassWork,
    SharedCost,
    overlapped_s,
)
from edge_run.partition.window import SHORT_SEGMENT_CHUNKS
from edge_run.runtime.forecasting.learned import Learned, learn
from edge_run.runtime.forecasting.pass_bytes import PassBytes
from edge_run.runtime.forecasting.routing import Point
from edge_run.runtime.graph.nodes import ATTENTION, COMPUTES_NOTHING, MATMULS, GraphMap, Node, choice_of_outputs
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_format import TENSOR_TYPES
from edge_run.tiers.gguf_header import ArrayValue, TensorInfo

WITH_MOVES = 4.0  # of the CPU time of reading alone: frames are moved, and books kept
AHEAD_BYTES = 2 * SHORT_SEGMENT_CHUNKS * CHUNK_BYTES  # of two segments of which all streams, and of a window for them


def of_two_segments(plan: Plan, n_bytes: float) -> float:
    """Return the bytes that stream of two segments in a row, on average, in a pass that reads `n_bytes`."""
    return AHEAD_BYTES * min(1.0, n_bytes / max(1, plan.model_bytes))


def window_of_many(plan: Plan) -> float:
    """Return the bytes of a window that many answers read well ahead through: twice what two segments need.

    In less, computing many answers and reading hardly overlap, as few reads are on their way at once.
    """
    return 2 * of_two_segments(plan, plan.streamed_bytes_per_batch)


def pass_work(
    gguf: GgufModel,
    graph: GraphMap,
    n_stops: int,
    part: Collection[int] | None = None,
    window: AttentionWindow = NO_WINDOW,
) -> PassWork:
    """Return the work of a pass over `graph` that stops `n_stops` times.

    part: the nodes that count; None for all. window: of the attention.
    """
    tensors = {tensor.name: tensor for tensor in gguf.tensors}
    choice = choice_of_outputs(graph)
    nodes = [(i, node) for i, node in enumerate(graph) if part is None or i in part]
    matmuls = [
        _matmul(gguf, tensor, node.op == "MUL_MAT_ID", i > choice)
        for i, node in nodes
        if node.op in MATMULS
        for read in node.reads
        if (tensor := tensors.get(read.name))
    ]
    n_nodes = sum(node.op not in COMPUTES_NOTHING for _, node in nodes)
    largest = max((matmul.size_bytes for matmul in matmuls if matmul.n_experts), default=0)
    flops = _attention_flops(gguf, [node for _, node in nodes])
    return PassWork(_together(matmuls), n_nodes, n_stops, flops, largest, window)


def shared_work(
    gguf: GgufModel,
    graph: GraphMap,
    n_stops: int,
    on_gpu: Collection[str],
    *,
    has_op_offload: bool,
    window: AttentionWindow = NO_WINDOW,
) -> tuple[PassWork, GpuWork]:
    """Return the work of a pass over `graph` on the processor, and on a GPU that has the weights `on_gpu`.

    A node without weights is computed where the last node with weights was. Layers with a window are taken to be spread
    evenly over both.
    """
    part: set[int] = set()
    n_borders, is_there = 0, False
    for i, node in enumerate(graph):
        weights = [read for read in node.reads if not read.row_bytes]
        was_there, is_there = is_there, any(read.name in on_gpu for read in weights) if weights else is_there
        n_borders += is_there != was_there
        if is_there:
            part.add(i)
    rest = frozenset(range(len(graph))) - part
    there = pass_work(gguf, graph, 0, part, window)
    return pass_work(gguf, graph, n_stops, rest, window), GpuWork(there, n_borders, has_op_offload)


def _matmul(gguf: GgufModel, tensor: TensorInfo, is_expert: bool, is_head: bool) -> MatmulWork:
    row_elements, _, n_experts, *_ = (*tensor.shape, 1, 1, 1) if is_expert else (*tensor.shape[:1], 1, 0)
    return MatmulWork(
        TENSOR_TYPES[tensor.type_id].name,
        row_elements,
        tensor.size_bytes,
        n_experts,
        min(n_experts, gguf.used_experts),
        is_head,
    )


def _together(matmuls: Sequence[MatmulWork]) -> tuple[MatmulWork, ...]:
    """Return `matmuls` with the entries of one kind added up."""
    sizes: dict[MatmulWork, int] = {}
    for work in matmuls:
        kind = replace(work, size_bytes=0)
        sizes[kind] = sizes.get(kind, 0) + work.size_bytes
    return tuple(replace(kind, size_bytes=size) for kind, size in sizes.items())


def _attention_flops(gguf: GgufModel, graph: Sequence[Node]) -> float:
    """Return the work of attention in all layers, per token and position that the token attends to."""
    heads, width = gguf.value("attention.head_count"), gguf.value("embedding_length")
    heads = heads.largest if isinstance(heads, ArrayValue) else heads  # by layer, as of those that have attention
    if not isinstance(heads, int) or not isinstance(width, int) or not heads:
        return 0.0
    key, value = gguf.value("attention.key_length"), gguf.value("attention.value_length")
    elements = (key if isinstance(key, int) else width // heads) + (value if isinstance(value, int) else width // heads)
    n_layers = sum(
        node.op == ATTENTION or (node.op == "SOFT_MAX" and b"moe" not in node.name)  # not of a mixture's router
        for node in graph
    )
    return 2.0 * elements * heads * n_layers


def _repack_byte_s(plan: Plan, work: PassWork, profile: DeviceProfile) -> float:
    """Return the seconds that a core repacks for each byte that is read: of experts alone where these stream alone."""
    if plan.read_repacked:
        return 0.0
    speeds = {kernel.kind: kernel.repacked_bytes_per_s for kernel in profile.repacked_kernels}
    read = [matmul for matmul in work.matmuls if matmul.n_experts or not plan.expert_bytes]
    repacked = [matmul for matmul in read if matmul.kind in plan.repacked and matmul.kind in speeds]
    all_bytes = sum(matmul.size_bytes for matmul in read)
    return sum(matmul.size_bytes / speeds[matmul.kind] for matmul in repacked) / all_bytes if all_bytes else 0.0


class _Reading(NamedTuple):
    """The reading of a pass: the bytes, how long they take, and how long they keep a core busy.

    repack_s: what of that is repacking, which the time that they take has in it as well.
    """

    n_bytes: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    repack_s: float = 0.0


class PassTimes:
    """Predicts the passes of a plan on a device that was measured.

    reading_s: the seconds of reading a model that stays in memory.

    Computing and reading overlap; the first pass of a streamed model reads all of it.
    """

    def __init__(
        self,
        plan: Plan,
        work: PassWork,
        profile: DeviceProfile,
        disk: DiskProfile | None,
        threads: int,
        earlier: Sequence[Point] = (),
        gpu: tuple[GpuProfile, GpuWork] | None = None,
    ) -> None:
        """Predict for `plan`.

        work: the work of a pass on the processor.
        profile: the device.
        disk: the drive.
        threads: how many compute.
        earlier: what earlier runs of the model found, where it is streamed by expert.
        gpu: the profile of the GPU, and the work of a pass there.
        """
        self._work, self._bytes = work, PassBytes(plan, work)
        self._repack_byte_s, self._cores = _repack_byte_s(plan, work, profile), profile.logical_cores
        profile = profile.repacking(plan.repacked)
        self._costs = SharedCost(profile, threads, *gpu) if gpu else CostModel(profile, threads)
        self._shares_cores = threads >= profile.logical_cores
        self._plan, self._disk = plan, disk
        self._is_resident = plan.mode == "resident"
        self._learned = self._learn(earlier)
        reading = self._reading(1, 1, is_first=False)
        self.read_s = self._learned.wait_byte_s * reading.n_bytes or reading.wall_s
        self.reading_s = self._read(plan.model_bytes, 0, is_alone=True).wall_s if self._is_resident else 0.0

    def _learn(self, earlier: Sequence[Point]) -> Learned:
        if not earlier or not self._plan.expert_bytes or self._disk is None:
            return Learned()
        token_bytes, room = self._plan.streamed_bytes_per_pass, self._plan.expert_bytes
        return learn(earlier, self._disk, lambda n: self.compute_s(n, 0), token_bytes, room, self._bytes.all_experts)

    def _reading(self, tokens: int, n_outputs: int, is_first: bool) -> _Reading:
        """Return the reading of a pass; where memory is used for the first time, reading takes longer."""
        if self._is_resident:
            return _Reading()
        return self._read(*(self._bytes.at_first if is_first else self._bytes.later)(tokens, n_outputs))

    def _read(self, new_bytes: float, used_bytes: float, *, is_alone: bool = False) -> _Reading:
        """Return the reading of `new_bytes` into new memory, and of `used_bytes` into memory that was used before.

        is_alone: whether nothing is computed meanwhile. Readers that repack read nothing meanwhile: one after the other
        where no core is idle, else as many at a time as there are cores. A learned time has that in it.
        """
        if self._disk is None:
            return _Reading()
        used_cpu, new_cpu = self._disk.cpu_s_per_byte
        used_byte_s = 1 / self._disk.bytes_per_s
        at_once = 1 if self._shares_cores and not is_alone else max(1, min(self._plan.readers, self._cores))
        repack_byte_s = self._repack_byte_s / at_once
        new_byte_s = self._learned.first_use_byte_s or 1 / self._disk.first_use_bytes_per_s + repack_byte_s
        wall_s = new_bytes * new_byte_s + used_bytes * (used_byte_s + repack_byte_s)
        repack_s = (new_bytes + used_bytes) * self._repack_byte_s
        cpu_s = new_bytes * new_cpu + used_bytes * used_cpu * WITH_MOVES + repack_s
        return _Reading(new_bytes + used_bytes, wall_s, cpu_s, repack_s)

    def compute_s(self, tokens: int, position: int, n_outputs: int = 1) -> float:
        """Return the seconds of computing alone."""
        return self._costs.compute_s(self._work, tokens, position, n_outputs)

    def pass_s(self, tokens: int, position: int, n_outputs: int, is_first: bool) -> float:
        """Return the seconds of a pass of `tokens` tokens after `position` others.

        Readers that find no idle core take time from the computing threads, which wait for each other. In a window of
        less than two segments the end of each is read when it is waited for, beside what comes after it. Experts are
        known only when they are needed; of many experts, one tensor is read while another is computed. A control group
        limits the mean bandwidth over some time: what was not read while computing is read the faster afterwards.
        """
        reading = self._reading(tokens, n_outputs, is_first)
        taken_s = min(reading.cpu_s, reading.wall_s) if self._shares_cores else 0.0
        compute_s = self.compute_s(tokens, position, n_outputs)
        if is_first:
            return max(reading.wall_s, compute_s + taken_s)
        found = self._learned.token if tokens == 1 else self._learned.batch
        busy_s = compute_s + (found.at(reading.n_bytes) if found else taken_s)
        apart_s = busy_s if found else busy_s - min(taken_s, reading.repack_s)  # the time of reading has that too
        if not self._plan.expert_bytes and not self._reads_ahead(reading.n_bytes):
            return apart_s + reading.wall_s
        if not self._plan.expert_bytes or (self._disk and self._disk.limit):
            return overlapped_s(reading.wall_s, busy_s)
        if tokens == 1:
            return apart_s + self.read_s
        return math.hypot(reading.wall_s, busy_s) if self._bytes.is_ahead(tokens) else apart_s + reading.wall_s

    def _reads_ahead(self, n_bytes: float) -> bool:
        """Return whether dense weights are read while those before them are used, in a pass that reads `n_bytes`."""
        plan = self._plan
        if plan.spilled_kv_bytes:  # keys and values have frames of their own
            return True
        return plan.window_bytes >= min(max(of_two_segments(plan, n_bytes), 2 * CHUNK_BYTES), n_bytes)

    def prefill_s(self, tokens: int, micro_batch_tokens: int, is_first: bool) -> float:
        """Return the seconds from a prompt of `tokens` tokens to the first token of its answer.

        micro_batch_tokens: the tokens of a full pass.
        is_first: whether the model was just opened.
        """
        passes = [(min(micro_batch_tokens, tokens - start), start) for start in range(0, tokens, micro_batch_tokens)]
        return is_first * self.reading_s + sum(
            self.pass_s(width, start, int(start + width == tokens), is_first and start == 0) for width, start in passes
        )


def forecast(
    times: PassTimes, answering: PassTimes, prompt_tokens: int, micro_batch_tokens: int, load_s: float
) -> Forecast:
    """Return how long a prompt of `prompt_tokens` tokens and each token after it will take.

    times: of the prompt. answering: of the tokens after it.
    """
    first_token_s, prefill_s = (
        times.prefill_s(prompt_tokens, micro_batch_tokens, is_first) for is_first in (True, False)
    )
    compute_s, token_s = answering.compute_s(1, prompt_tokens), answering.pass_s(1, prompt_tokens, 1, is_first=False)
    return Forecast(
        prompt_tokens=prompt_tokens,
        load_s=load_s,
        first_token_s=first_token_s,
        prefill_tokens_per_s=prompt_tokens / prefill_s if prefill_s else 0.0,
        decode_tokens_per_s=1 / token_s if token_s else 0.0,
        compute_s_per_token=compute_s,
        read_s_per_token=answering.read_s,
        limit="disk" if answering.read_s > compute_s else "compute",
    )
