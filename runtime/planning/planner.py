"""Plans of a model before anything is loaded, for `edge-run plan`.

A run plans from its own context and graph (`runtime/engine/engine.py`). A planner plans from those that an inspection
has found, under the same terms and through the same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from edge_run.base.config import PROMPT_TOKENS
from edge_run.base.errors import BudgetError, ConfigError, ContextFull, option
from edge_run.base.profile import DeviceProfile, GpuProfile
from edge_run.base.results import ContextPoint, Plan
from edge_run.base.units import MIB, round_up
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.profile import disk_of
from edge_run.partition.cost import TILE_TOKENS, AttentionWindow, PassWork
from edge_run.partition.parallel import NUMBERS
from edge_run.partition.window import segment_chunks_in
from edge_run.prefetch.schedule import Segment
from edge_run.runtime.forecasting import routing
from edge_run.runtime.forecasting.abreast import MOST_UNMEASURED, Abreast
from edge_run.runtime.forecasting.forecast import PassTimes, forecast, pass_work, shared_work
from edge_run.runtime.forecasting.pass_bytes import PassBytes, read_bytes_at
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.segments import chunks_of, cut_into_segments
from edge_run.runtime.inspection.inspection import SHARD_BYTES
from edge_run.runtime.llama.context_shape import context_shape, lends_cells
from edge_run.runtime.llama.holdings import Holdings, lookup_bytes, text_reserve_bytes
from edge_run.runtime.llama.logit_rows import LOGIT_BYTES
from edge_run.runtime.llama.work_buffer import work_bytes
from edge_run.runtime.planning.expert_plan import moe_terms, plan_moe
from edge_run.runtime.planning.experts import Cuts, routed_read
from edge_run.runtime.planning.keep_terms import with_bounds
from edge_run.runtime.planning.memory_plan import (
    make_plan,
    plan_plain,
    plan_resident,
    plan_streamed,
    row_ranges,
    streamed_terms,
    with_page_tables,
)
from edge_run.runtime.planning.prepared import Prepared
from edge_run.runtime.planning.repack_choice import kinds_to_pack
from edge_run.runtime.planning.repack_terms import with_repacking
from edge_run.runtime.planning.spill_terms import with_spill
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.address_space import AddressSpace, MappedSpan, clipped
from edge_run.tiers.drives.copied_source import buffer_bytes
from edge_run.tiers.kv.cells import LEAST_SPARSE_BYTES
from edge_run.tiers.kv.loans import idle_bytes
from edge_run.tiers.packed_file import packed_path
from edge_run.tiers.rows import RowRange

CLEARED_BYTES_PER_S = 2e9  # of fresh memory: llama.cpp zeroes its caches, also those that take none yet, in no time
OPENING_S_PER_NODE = 35e-6
RUN_BYTES = 28 * MIB  # of Python modules that a run of the program loads, and an inspection does not
SWEPT_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


class Planner:
    """Plans one model under any number of budgets. Reads nothing. It is large because its plans share what it finds."""

    def __init__(self, prepared: Prepared, *, is_packed: bool = False) -> None:
        """Plan the model of `prepared`, whose file must have been inspected.

        is_packed: as if a packed file held all weights repacked that stream.
        """
        assert prepared.known is not None, "a plan of a file that was not looked at"
        self._is_packed, self.prepared = is_packed, prepared
        self.known, self.offload = known, offload = prepared.known, prepared.offload
        self.gguf, self.config = gguf, config = prepared.gguf, prepared.config
        self.threads = compute_threads(config.threads)
        work = work_bytes(gguf, known.micro_batch_tokens, self.threads)
        shape = context_shape(config, known.trained_context_tokens, self.threads)
        program = known.program_bytes + RUN_BYTES
        reserve = text_reserve_bytes(known.vocabulary, shape.kept_rows, known.context_tokens)
        moved_bytes = prepared.draft_offload.moved_bytes if prepared.draft_offload else 0
        draft_bytes = prepared.draft.host_bytes(moved_bytes) if prepared.draft else 0
        self._holdings = Holdings(program, reserve, known.kv_bytes, known.buffer_bytes, work, draft_bytes)
        self._holdings = replace(self._holdings, lookup_bytes=lookup_bytes(config, shape.sequence_tokens))
        if config.also:
            self._holdings = replace(self._holdings, copy_bytes=buffer_bytes(config.readers))
        self._spans: Sequence[MappedSpan] = known.spans
        if offload:
            self._holdings = offload.added_to(self._holdings)
            self._spans = clipped(known.spans, self._host_ranges())
        self._address_space = AddressSpace(self._spans, staying=prepared.staying(self._spans))
        self.window = AttentionWindow(known.window_tokens, known.windowed_share if known.window_tokens else 0.0)

    @functools.cached_property
    def _graph(self) -> GraphMap:
        return self.offload.on_host(self.known.graph) if self.offload else self.known.graph

    def _host_ranges(self) -> list[tuple[int, int]]:
        """Return (file address, length) of the weights that are not only on a GPU."""
        read = {read.name for node in self._graph for read in node.reads}
        on_gpu = self.offload.sizes.names if self.offload else frozenset[str]()
        tensors = (tensor for tensor in self.gguf.tensors if tensor.name in read or tensor.name not in on_gpu)
        return [(tensor.shard * SHARD_BYTES + tensor.offset, tensor.size_bytes) for tensor in tensors]

    @functools.cached_property
    def _chunks(self) -> Collection[int]:
        """The chunks with weights that the processor reads."""
        if not self.offload:
            return range(self._address_space.n_chunks)
        return self._address_space.holding(self._host_ranges())

    @property
    def opening_bytes(self) -> int:
        """The memory that the model takes while it is opened."""
        holdings, terms = self._holdings, self._terms
        kv_bytes = max(0, holdings.kv_bytes - self.known.cell_bytes) if terms.cells else holdings.kv_bytes
        draft = self.prepared.draft
        draft_bytes = draft.least_bytes if draft and terms.draft_cells else holdings.draft_bytes
        return self.known.program_bytes + kv_bytes + holdings.buffer_bytes + draft_bytes

    @functools.cached_property
    def _terms(self) -> Terms:
        known = self.known
        terms = self.prepared.terms(self._holdings, known.context_tokens, known.micro_batch_tokens)
        if self.offload:  # which moves cells and buffers to a GPU
            return terms
        shape = context_shape(self.config, known.trained_context_tokens, self.threads)
        output_bytes = LOGIT_BYTES * known.vocabulary * shape.outputs_per_pass
        idle = 0 if shape.pooling else idle_bytes(known.buffer_bytes - output_bytes, known.narrow_bytes)
        is_by_cell = known.cell_bytes >= LEAST_SPARSE_BYTES and lends_cells(self.config)
        cells = replace(known.cells, n_streams=shape.n_streams) if is_by_cell else None
        draft = self.prepared.draft
        draft_cells, chunk_bytes = draft.cells if draft else None, self._address_space.chunk_bytes
        lent = self.prepared.lending(terms, shape, chunk_bytes, cells, draft_cells, idle, known.vocabulary)
        lent = with_bounds(lent, known.cells.tensors, known.cell_uses, self.config)
        return with_spill(lent, known.cell_uses, self.config)

    @functools.cached_property
    def _ranges(self) -> list[RowRange]:
        tokens, has_row_slices = self.known.micro_batch_tokens, self._terms.has_row_slices
        return row_ranges(self._graph, self._address_space, tokens, has_row_slices=has_row_slices)

    @functools.cached_property
    def _cut(self) -> Callable[[int], list[Segment]]:
        graph, space, sliced = self._graph, self._address_space, self._terms.has_row_slices
        by_read = functools.partial(chunks_of, address_space=space, tables=self._ranges)

        def cut(most: int) -> list[Segment]:
            return cut_into_segments(graph, by_read, most, space if sliced else None)

        return lambda most: self._cuts.get(graph, space, ("pass", sliced, most), functools.partial(cut, most))

    def plan(self, budget_bytes: int | None = None) -> Plan:
        """Return the plan under a budget, by default the configured one. Raises BudgetError when it is too small."""
        if unstreamed := self._unstreamed(budget_bytes):
            return unstreamed
        terms = self._terms_under(budget_bytes)
        if moe := plan_moe(terms, self._graph, self._address_space, self._cuts):
            return moe.plan
        return plan_streamed(terms, self._address_space, self._cut, self._ranges)[0]

    def sketch(self, budget_bytes: int | None = None) -> Plan:
        """Return the plan; where weights stream, only its mode, its context and what it holds besides weights.

        Which weights of a large model stay takes long to find. Raises BudgetError as `plan` does.
        """
        if unstreamed := self._unstreamed(budget_bytes):
            return unstreamed
        terms = self._terms_under(budget_bytes)
        fitting = moe_terms(terms, self._graph, self._address_space, self._cuts) or streamed_terms(
            terms, self._address_space, self._cut, self._ranges
        )
        return make_plan(fitting, mode="streamed", items=fitting.holdings.items())

    def _unstreamed(self, budget_bytes: int | None) -> Plan | None:
        """Return the plan of a run in which nothing streams; None where not all has room."""
        budget_bytes = self.prepared.budget_bytes if budget_bytes is None else budget_bytes
        if self.prepared.why_plain:
            held = Holdings(0, self._holdings.reserve_bytes, self._holdings.kv_bytes)
            return plan_plain(replace(self._streamed_terms, budget_bytes=budget_bytes, holdings=held))
        if self._whole_bytes <= budget_bytes and not self.config.kv_keep:  # whose choice is made in passes that stop
            resident = replace(self._resident_terms, budget_bytes=budget_bytes)
            return plan_resident(resident, self._address_space, self._chunks)
        return None

    def _terms_under(self, budget_bytes: int | None) -> Terms:
        """Return the terms of a run whose weights stream, under a budget."""
        budget_bytes = self.prepared.budget_bytes if budget_bytes is None else budget_bytes
        gpu = self.offload.streamed(self.gguf).plan if self.offload else None
        return replace(self._streamed_terms, budget_bytes=budget_bytes, gpu=gpu)

    @functools.cached_property
    def _cuts(self) -> Cuts:
        """What this and other plans cut already; each part for a GPU leaves another graph."""
        return (None if self.offload else self.prepared.cuts) or Cuts()

    @functools.cached_property
    def _streamed_terms(self) -> Terms:
        """The terms of a run whose weights stream."""
        prepared = self.prepared
        terms = with_repacking(self._terms, self._graph, prepared.repacked_streamed, prepared.repacked_file)
        return replace(terms, is_read_repacked=True) if self._is_packed else terms

    @functools.cached_property
    def _resident_terms(self) -> Terms:
        """The terms of a run whose weights all fit."""
        return with_repacking(replace(self._terms, holdings=self._holdings), self._graph, self.prepared.repacked)

    @property
    def _whole_bytes(self) -> int:
        weights_bytes = len(self._chunks) * self._address_space.chunk_bytes
        return with_page_tables(self._resident_terms.holdings.total_bytes + weights_bytes)

    @functools.cached_property
    def minimum_bytes(self) -> int:
        """The smallest budget that works."""
        try:
            return self.plan(1).minimum_bytes
        except BudgetError as error:
            return error.minimum_bytes

    def sweep(self) -> list[Plan]:
        """Return plans under budgets from the smallest that works to one that holds the whole model."""
        least, whole = self.minimum_bytes, self._whole_bytes
        budgets = [round_up(int(least + share * (whole - least)), MIB) for share in SWEPT_SHARES]
        return [told(self, budget) for budget in dict.fromkeys(budgets)]

    def widened(self, factor: int) -> Planner:
        """Return the planner of a micro-batch `factor` times as large; buffers are taken to grow in proportion."""
        tokens, buffer_bytes = self.known.micro_batch_tokens * factor, self.known.buffer_bytes * factor
        known = replace(self.known, micro_batch_tokens=tokens, buffer_bytes=buffer_bytes)
        return Planner(replace(self.prepared, known=known))

    @functools.cached_property
    def work(self) -> PassWork:
        """The work of a pass that does not stop, wherever its parts are computed."""
        return pass_work(self.gguf, self.known.graph, 0, window=self.window)

    def times(self, plan: Plan, profile: DeviceProfile) -> PassTimes:
        """Return the times of `plan`'s passes on the device of `profile`, with the drive that holds the model."""
        profile, n_stops = with_attention_on(profile, self.prepared), 0
        if plan.expert_bytes:
            n_stops = sum(routed_read(node) is not None for node in self.known.graph)
        elif plan.mode == "streamed" and plan.window_bytes:  # else all stays, and no pass stops for it
            n_stops = len(self._cut(segment_chunks_in(plan.window_bytes // self._address_space.chunk_bytes)))
        disk, points = disk_of(profile, self.gguf.shards[0].path), self._terms.experience.points
        other = disk_of(profile, Path(self.config.also)) if self.config.also else None
        if disk and other and disk != other:
            disk = disk.beside(other)
        if self.offload and plan.gpu and (gpu := self._gpu_of(profile)):
            names, has_op_offload = self.offload.sizes.names, plan.gpu.op_offload
            work, there = shared_work(
                self.gguf, self.known.graph, n_stops, names, has_op_offload=has_op_offload, window=self.window
            )
            return PassTimes(plan, work, profile, disk, self.threads, points, (gpu, there))
        work = replace(self.work, n_stops=n_stops)
        return PassTimes(plan, work, profile, disk, self.threads, points)

    def can_time(self, profile: DeviceProfile) -> bool:
        """Return whether `profile` has the speed of all that computes, and our loader runs the model."""
        return all((profile.kernels, not self.prepared.why_plain, not self.offload or self._gpu_of(profile)))

    def _timed_point(self, plan: Plan, point: ContextPoint, profile: DeviceProfile) -> ContextPoint:
        """Return `point` with the speed of decoding there."""
        token_s = self._times_at(plan, point.tokens, profile).pass_s(1, point.tokens, 1, is_first=False)
        return replace(point, decode_tokens_per_s=1 / token_s if token_s else 0.0)

    def _times_at(self, plan: Plan, tokens: int, profile: DeviceProfile) -> PassTimes:
        """Return the times of passes of single tokens when the context has `tokens` tokens."""
        return self.times(replace(plan, streamed_bytes_per_pass=read_bytes_at(plan, tokens)), profile)

    def _gpu_of(self, profile: DeviceProfile) -> GpuProfile | None:
        name = self.offload.gpu.name if self.offload else ""
        return next((gpu for gpu in profile.gpus if gpu.backend == name and gpu.kernels and gpu.node_s), None)

    def timed(self, plan: Plan, profile: DeviceProfile | None, prompt_tokens: int | None = None) -> Plan:
        """Return `plan` with its forecast for a prompt of `prompt_tokens` tokens, on the device of `profile`.

        Where the device, or a GPU that has a part of the model, was not measured, there is no forecast.
        prompt_tokens: None for a usual number. Raises ConfigError or ContextFull for one that cannot be.
        """
        prompt_tokens = timed_tokens(self, plan.context_tokens, prompt_tokens)
        if profile is None or not self.can_time(profile):
            return plan
        fresh_bytes = max(0, plan.kv_bytes - (self.known.cell_bytes if self._terms.cells else 0))
        load_s = self.known.load_s + len(self.known.graph) * OPENING_S_PER_NODE + fresh_bytes / CLEARED_BYTES_PER_S
        times, answering = self.times(plan, profile), self._times_at(plan, prompt_tokens, profile)
        expected = forecast(times, answering, prompt_tokens, self.known.micro_batch_tokens, load_s)
        expected = replace(expected, read_bytes_per_token=read_bytes_at(plan, prompt_tokens))
        if self.config.embeddings:  # no token is made
            return replace(plan, forecast=replace(expected, decode_tokens_per_s=0.0))
        points = tuple(self._timed_point(plan, point, profile) for point in plan.by_context)
        plan = replace(plan, by_context=points)
        if (number := self.config.sequences) > 1:
            speed = abreast(self, plan, profile).tokens_per_s(number)
            expected = replace(expected, parallel=number, parallel_tokens_per_s=speed)
        return replace(plan, forecast=expected)


def told(planner: Planner, budget_bytes: int | None = None) -> Plan:
    """Return the plan as it is told to a user: with the smallest budget that works.

    That of a mixture takes seconds to find where the model is large, so that a run goes without (`plan_moe`).
    """
    plan = planner.plan(budget_bytes)
    return replace(plan, minimum_bytes=min(plan.minimum_bytes, planner.minimum_bytes)) if plan.expert_bytes else plan


def abreast(planner: Planner, plan: Plan, profile: DeviceProfile | None) -> Abreast:
    """Return what many answers at once would make under `plan`, on the device of `profile`, or on a usual one."""
    work = planner.work
    earlier = routing.recall(planner.gguf, planner.config.cache).points
    hoped_bytes = 0 if earlier else PassBytes(plan, work).hoped_bytes

    def pass_s(one: Plan, number: int, position: int) -> float:
        if profile:
            if number >= TILE_TOKENS and not planner.offload:  # a tile looks at what any of its texts has
                position *= number
            return planner.times(one, profile).pass_s(number, position, number, is_first=False)
        return PassBytes(one, work).usual_s(number, number)

    most, known, config = NUMBERS[-1] if profile else MOST_UNMEASURED, planner.known, planner.config
    state_bytes = max(0, known.kv_bytes - known.cell_bytes) // config.sequences
    answer_bytes = known.vocabulary * LOGIT_BYTES + state_bytes
    return Abreast(plan, pass_s, answer_bytes, config.sequences, most, hoped_bytes, config.request_tokens)


def timed_tokens(planner: Planner, context_tokens: int, asked: int | None) -> int:
    """Return the length of the prompt to time: what is asked for, or a usual one as far as the context has room.

    context_tokens: those of a plan. Raises ConfigError for no token, ContextFull for more than there is room for.
    """
    most_tokens = context_tokens - (not planner.config.embeddings)  # an answer has a token too
    if asked is None:
        return min(PROMPT_TOKENS, most_tokens)
    if asked < 1:
        raise ConfigError(f"prompt of {asked} tokens: must be at least 1 token")
    if asked > most_tokens:
        raise ContextFull(
            f"{planner.gguf.shards[0].path}: a prompt of {asked} tokens does not fit the context of {context_tokens}; "
            f"give more with {option('context_tokens')}, or shorten it ({option('prompt_tokens')})",
            prompt_tokens=asked,
            context_tokens=context_tokens,
        )
    return asked


def with_attention_on(profile: DeviceProfile, prepared: Prepared) -> DeviceProfile:
    """Return `profile` with the speed of attention on keys and values of the types that `prepared` has.

    Where that was not measured: on quantised ones llama.cpp has no kernel for many tokens at once on a processor.
    """
    (narrow, wide), (k, v) = profile.attention_flops_per_s, prepared.config.kv_types
    if prepared.attention:
        narrow, wide = narrow * prepared.attention.narrow, wide * prepared.attention.wide
    elif k != v or k not in ("f16", "f32"):
        wide = narrow
    return replace(profile, attention_flops_per_s=(narrow, wide))


def packed(planner: Planner, plan: Plan) -> tuple[Planner, Plan] | None:
    """Return planner and plan of a run that reads the file which `edge-run pack` would write; None without use.

    plan: of the run as it is. A mixture's packed file holds its experts instead, and one that there is, it reads.
    """
    config, gguf = planner.config, planner.gguf
    has_one = config.packed is not None or packed_path(gguf.shards[0].path).exists()
    is_of_use = plan.mode == "streamed" and not (plan.expert_bytes or planner.offload)
    if has_one or not is_of_use or config.repack == "off" or not (kinds := kinds_to_pack(gguf, config)):
        return None
    other = Planner(replace(planner.prepared, repacked_streamed=kinds), is_packed=True)
    try:
        return other, other.plan(plan.budget_bytes)
    except BudgetError:  # reading it takes some memory
        return None
