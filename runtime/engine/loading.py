"""llama.cpp's part of an opening: the model without its weights, and a context, whose memory is measured.

Where page frames cannot be moved, or the installed llama.cpp is an unknown version, llama.cpp's own loader reads the
weights here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from edge_run.base.files.identity import FileIdentity
from edge_run.base.results import Backend, Numerics, Plan
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.memory import budgeted_memory
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.decoding.repacked_weights import RepackedWeights
from edge_run.runtime.decoding.short_pass import map_short_pass
from edge_run.runtime.decoding.warm_up import usual_passes, warm_up
from edge_run.runtime.gpu.loading import host_ranges, load_stubs
from edge_run.runtime.gpu.offload import OffloadTooLarge, shrink_offload
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.runtime.inspection.learned_positions import learned_positions
from edge_run.runtime.inspection.model_kind import check_decoder_only
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.context_shape import ContextShape, context_shape
from edge_run.runtime.llama.exact_kernels import leave_out_tiles
from edge_run.runtime.llama.holdings import Holdings, lookup_bytes, text_reserve_bytes
from edge_run.runtime.llama.library import library_version
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.runtime.llama.work_buffer import work_bytes
from edge_run.runtime.planning.memory_plan import with_page_tables
from edge_run.runtime.planning.prepared import Prepared
from edge_run.runtime.planning.repack_choice import choose_kinds
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.planning.usual_context import rope_factors
from edge_run.runtime.speculation.draft_model import DraftModel
from edge_run.tiers import _libc
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.drives.copied_source import CopiedSource, Drives, buffer_bytes
from edge_run.tiers.drives.copy_check import check_copy, find_copies
from edge_run.tiers.partial import PartialModel, PartialSource
from edge_run.tiers.source import SourceFile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightBacking:
    """The memory of a model's weights, and the files behind it.

    address_space: where the weights lie in memory.
    sources: the shards, by number.
    chunks: the chunks with weights that the processor reads.
    is_whole: whether all weights fit, so that no pass stops for them.
    repacked: the weights that are repacked as they are read; None where there are none.
    drives: those of the files and of their copies; None where there are no copies.
    """

    address_space: AddressSpace
    sources: Sequence[SourceFile]
    chunks: Sequence[int]
    is_whole: bool
    repacked: RepackedWeights | None = None
    drives: Drives | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that llama.cpp has open, whose weights have not been read.

    prepared: what was known before, corrected by the memory that a GPU really takes.
    model: llama.cpp's model.
    draft: the draft model, if there is one.
    shape: the shape of the context.
    context: llama.cpp's context.
    driver: the callback of the context.
    holdings: the memory that the process holds besides weights.
    backend: which loader runs the model.
    backing: the memory of the weights; None where llama.cpp's own loader read them.
    """

    prepared: Prepared
    model: LlamaModel
    draft: DraftModel | None
    shape: ContextShape
    context: LlamaContext
    driver: Driver
    holdings: Holdings
    backend: Backend
    backing: WeightBacking | None = None

    @property
    def numerics(self) -> Numerics:
        """The numerics key; of a part of a model also what activations are that come from other devices."""
        shape, config, offload = self.shape, self.prepared.config, self.prepared.offload
        return Numerics(
            library=library_version(),
            use_extra_bufts=self.backing is None and config.repack == "on",
            threads=shape.threads,
            flash_attention=shape.flash_attention,
            kv_type_k=shape.kv_type_k,
            kv_type_v=shape.kv_type_v,
            micro_batch_tokens=shape.micro_batch_tokens,
            sequences=shape.sequences,
            exact=shape.is_exact,
            gpu=offload.key if offload else "",
            mesh_activations=config.mesh_activations if self.driver.is_partial else "exact",
            repacked=", ".join(self.repacked),
            kernels=ggml.kernel_features(),
            kv_keep=f"{config.kv_keep_by} {config.kv_keep}" if config.kv_keep else "",
            rope_factors=rope_factors(self.prepared.gguf, self.context.context_tokens // shape.n_streams),
            pooling=shape.pooling,
            rollback_tokens=self.context.rollback_tokens,
        )

    @property
    def repacked(self) -> tuple[str, ...]:
        """The kinds of weights that are repacked."""
        return self.backing.repacked.kinds if self.backing and self.backing.repacked else ()

    def terms(self, holdings: Holdings) -> Terms:
        """Return the terms of a plan, for a process that holds `holdings` besides weights."""
        terms = self.prepared.terms(holdings, self.context.context_tokens, self.shape.micro_batch_tokens)
        is_read = bool(self.backing and self.backing.repacked and self.backing.repacked.packed)
        return replace(terms, repacked=self.repacked, is_read_repacked=is_read)

    def enter_in_ledger(self, plan: Plan, ledger: Ledger, stack: ExitStack) -> None:
        """Enter the memory of `plan` in the ledger of this user's runs. Raises BudgetError when too little is free."""
        sizes = {item.what: item.size_bytes for item in plan.items}
        held = sizes["program"] + (self.draft.taken_bytes if self.draft else 0)
        name = self.prepared.gguf.shards[0].path.name
        stack.enter_context(ledger.grant(sum(sizes.values()), name, held_bytes=held))


def load(
    prepared: Prepared,
    driver: Driver,
    stack: ExitStack,
    *,
    partial: PartialModel | None = None,
    may_be_whole: bool = True,
) -> Loaded:
    """Load the model without its weights; where a GPU turns out to be too small, again with a smaller part on it.

    stack: frees the model on closing.
    partial: the pieces of the model that are present, where these are not all.
    may_be_whole: whether a model that fits is read as a whole.
    """
    while True:
        try:
            with ExitStack() as attempt:
                loading = _Loading(prepared, driver, attempt)
                is_ours = not prepared.why_plain
                loaded = loading.ours(partial, may_be_whole) if is_ours else loading.plain()
                stack.push(attempt.pop_all())
                return loaded
        except OffloadTooLarge as error:
            assert prepared.offload
            offload = shrink_offload(prepared.gguf, prepared.config, prepared.offload, error.minimum_bytes)
            prepared = replace(prepared, offload=offload)
            logger.info("%s; less of the model goes there", error)


class _Loading:
    """One attempt at loading a model."""

    def __init__(self, prepared: Prepared, driver: Driver, stack: ExitStack) -> None:
        self._prepared, self._driver, self._stack = prepared, driver, stack
        self._offload, self._is_warm = prepared.offload, False
        self._draft = stack.enter_context(self._open_draft(prepared.draft)) if prepared.draft else None

    def _open_draft(self, file: DraftFile) -> DraftModel:
        offload = self._prepared.draft_offload
        # it guesses for few texts at a time; the sequences that it may have are many more, for the beams of its guesses
        texts, repack = max(1, file.most_texts), "off" if offload else self._prepared.config.repack
        config = replace(file.config, sequences=texts, repack=repack)
        return DraftModel(file, offload, choose_kinds(file.gguf, config), self._driver.interrupt)

    def plain(self) -> Loaded:
        """Let llama.cpp's own loader read the weights."""
        model = self._model([shard.path for shard in self._prepared.gguf.shards])
        context, _ = self._context(model, None, stops=False)
        backend = Backend("llama.cpp", self._prepared.why_plain)
        return self._loaded(
            model, context, Holdings(0, text_reserve_bytes(model.vocabulary), context.kv_bytes), backend
        )

    def ours(self, partial: PartialModel | None, may_be_whole: bool) -> Loaded:
        """Load a stub, and reserve the address space of the weights."""
        gguf, budget_bytes = self._prepared.gguf, self._prepared.budget_bytes
        sources, drives = self._sources(partial)
        buffered = [source.path for source in sources if not source.is_direct]
        why = f"{buffered[0]}: no direct reads on this file system, so they are buffered" if buffered else ""
        spans, model = load_stubs(gguf, self._model)
        if not partial:
            gguf.check_unchanged()  # llama.cpp was shown the header that the path led to
        address_space = AddressSpace(spans, self._prepared.config.chunk_bytes, staying=self._prepared.staying(spans))
        address_space.reserve()
        chunks = address_space.holding(host_ranges(model)) if self._offload else range(address_space.n_chunks)
        weights_bytes = len(chunks) * address_space.chunk_bytes

        def has_room(held: Holdings) -> bool:
            return with_page_tables(held.total_bytes + weights_bytes) <= budget_bytes

        is_whole = may_be_whole and has_room(self._with_draft(Holdings.now(model.vocabulary)))
        repacked = self._repacked(model, is_whole=is_whole)
        context, holdings = self._context(model, repacked, stops=not is_whole)
        if is_whole and not has_room(holdings):
            context.close()
            if repacked:
                repacked.undo()
            is_whole, repacked = False, self._repacked(model, is_whole=False)
            context, holdings = self._context(model, repacked, stops=True)
        backing = WeightBacking(address_space, sources, chunks, is_whole, repacked, drives)
        return self._loaded(model, context, holdings, Backend("edge-run", why), backing)

    def _repacked(self, model: LlamaModel, *, is_whole: bool) -> RepackedWeights | None:
        """Give weights the repacked kernels that were chosen; a context comes after that."""
        prepared = self._prepared
        kinds = prepared.repacked if is_whole else prepared.repacked_streamed
        if not kinds:
            return None
        graph = prepared.known.graph if prepared.known else map_short_pass(model, self._shape(model))
        packed = None if is_whole else prepared.repacked_file  # all is read once, and may be in the page cache
        repacked = RepackedWeights(model, prepared.gguf, graph, kinds, packed)
        self._stack.callback(repacked.close)
        return repacked

    def _loaded(
        self,
        model: LlamaModel,
        context: LlamaContext,
        holdings: Holdings,
        backend: Backend,
        backing: WeightBacking | None = None,
    ) -> Loaded:
        prepared = replace(self._prepared, offload=self._offload)
        shape = self._shape(model)
        return Loaded(prepared, model, self._draft, shape, context, self._driver, holdings, backend, backing)

    def _sources(self, partial: PartialModel | None) -> tuple[list[SourceFile], Drives | None]:
        """Open the shards, and their copies where there are any, which are checked first."""
        gguf, config = self._prepared.gguf, self._prepared.config
        drives, copies, checked = None, list[Path](), list[FileIdentity]()
        if config.also and not partial:
            copies = find_copies(gguf, Path(config.also))
            for shard, copy in zip(gguf.shards, copies, strict=True):
                checked.append(check_copy(shard, copy))
            drives = Drives(config.readers)
            self._stack.callback(drives.close)
            if copies[0].stat().st_dev == gguf.shards[0].path.stat().st_dev:
                drives.say(f"{copies[0]}: on the file system of {gguf.shards[0].path}, so reading both gains nothing")
        sources: list[SourceFile] = []
        for number, shard in enumerate(gguf.shards):
            if partial:
                sources.append(PartialSource(partial, number))
            else:
                sources.append(
                    CopiedSource(shard.path, copies[number], drives, shard.identity, checked[number])
                    if drives
                    else SourceFile(shard.path, shard.identity)
                )
            self._stack.callback(sources[-1].close)
        return sources, drives

    def _model(
        self,
        paths: list[Path],
        on_header_read: Callable[[], None] | None = None,
        on_upload: Callable[[], None] | None = None,
    ) -> LlamaModel:
        gguf = self._prepared.gguf
        path = gguf.shards[0].path
        placement = self._offload.load_placement if self._offload else None
        is_plain = bool(self._prepared.why_plain)
        left = [on_upload] if placement and on_upload else []

        def on_tensor() -> None:
            self._driver.interrupt.check()
            while left:
                left.pop()()

        model = LlamaModel(
            paths,
            on_header_read,
            path=path,
            placement=placement,
            on_tensor=on_tensor,
            is_repacked=is_plain and self._prepared.config.repack == "on",
        )
        self._stack.enter_context(model)
        check_decoder_only(gguf, model.has_encoder, model.has_decoder)
        if self._draft:
            self._draft.follow_vocabulary(model)
        if self._prepared.config.exact:
            leave_out_tiles(model)
        return model

    def _shape(self, model: LlamaModel) -> ContextShape:
        config = self._prepared.config
        shape = context_shape(config, model.trained_context_tokens, compute_threads(config.threads))
        return replace(shape, most_positions=learned_positions(self._prepared.gguf))

    def _context(
        self, model: LlamaModel, repacked: RepackedWeights | None, *, stops: bool
    ) -> tuple[LlamaContext, Holdings]:
        """Return a context, and the memory that the process then holds.

        repacked: the weights that readers repack. stops: whether passes stop for weights.
        """
        gguf, shape = self._prepared.gguf, self._shape(model)
        if self._offload and stops:
            self._offload = self._offload.streamed(gguf)
        _libc.trim_heap()
        before = budgeted_memory()
        if self._offload and not self._is_warm:
            passes = usual_passes(shape.micro_batch_tokens, is_software=self._offload.gpu.is_software)
            warm_up(model, shape, passes, self._prepared.budget_bytes)
            self._is_warm = True
        keeps_prompts = self._prepared.config.keeps_prompts and not self._prepared.why_nothing_kept
        is_followed = stops or self._driver.features or keeps_prompts
        callback = self._driver.callback if is_followed else None
        may_copy = self._offload is not None and self._offload.has_op_offload
        context = LlamaContext(model, shape, callback, may_copy_weights=may_copy, is_sparse=not self._offload)
        self._stack.callback(context.close)
        context.stop_at(self._driver.stop)
        reserve_bytes = text_reserve_bytes(model.vocabulary, shape.kept_rows, shape.context_tokens)
        work = work_bytes(gguf, shape.micro_batch_tokens, shape.threads)
        holdings = Holdings.since(before, context, work, reserve_bytes)
        holdings = replace(holdings, lookup_bytes=lookup_bytes(self._prepared.config, shape.sequence_tokens))
        if self._prepared.config.also:
            holdings = replace(holdings, copy_bytes=buffer_bytes(self._prepared.config.readers))
        if repacked:
            holdings = replace(holdings, repacking_bytes=repacked.memory_bytes(self._prepared.config.readers))
        return context, self._with_draft(self._with_gpu(holdings, context))

    def _with_gpu(self, holdings: Holdings, context: LlamaContext) -> Holdings:
        """Return `holdings` with the machine's memory that a GPU takes, after checking the GPU's budget."""
        if not self._offload:
            return holdings
        self._offload = self._offload.measured(context)
        program_bytes = max(0, holdings.program_bytes - self._offload.process_bytes)
        return self._offload.added_to(replace(holdings, program_bytes=program_bytes))

    def _with_draft(self, holdings: Holdings) -> Holdings:
        """Return `holdings` with the draft model's memory as an item of its own."""
        if not self._draft:
            return holdings
        program_bytes = max(0, holdings.program_bytes - self._draft.taken_bytes)
        return replace(holdings, program_bytes=program_bytes, draft_bytes=self._draft.held_bytes)
