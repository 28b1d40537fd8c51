"""The engine: llama.cpp computing on memory that we own, inside a budget.

Opening a model loads no weights. llama.cpp loads a stub, its context is made and measured, one pass that computes
nothing shows which weights are read when, and from that the plan follows: what is pinned, what streams, through how
many frames. Then the readers start, and the first pass waits for them stretch by stretch like every other.

A model that fits is read as a whole and computed without a callback: then this is llama.cpp at full speed. Where page
frames cannot be moved, or the installed llama.cpp is not the one we know, llama.cpp's own loader runs the model, and
says why.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import system_errors
from edge_run.base.profile import DeviceProfile
from edge_run.base.protocols import BatchToken
from edge_run.base.results import Backend, ExpertUse, MemoryUse, MeshUse, Numerics, Plan
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.decoder import FrontDecoder, LocalDecoder
from edge_run.runtime.decoding.driver import Driver, PassShape, compile_program
from edge_run.runtime.decoding.progress import Timeline, pass_steps
from edge_run.runtime.decoding.warm_up import warm_up
from edge_run.runtime.decoding.weight_copies import CopySchedule, WeightCopies
from edge_run.runtime.gpu.loading import host_ranges, host_weights, load_stubs, open_upload
from edge_run.runtime.gpu.offload import OffloadTooLarge, shrink_offload
from edge_run.runtime.inspection.model_kind import check_decoder_only
from edge_run.runtime.llama.context_shape import context_shape
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.llama.library import library_version
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.runtime.llama.threads import compute_threads
from edge_run.runtime.planning import routing
from edge_run.runtime.planning.forecast import PassTimes
from edge_run.runtime.planning.memory_plan import plan_plain, plan_resident
from edge_run.runtime.planning.offload_times import note_paces, part_of
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.prepare import prepare
from edge_run.runtime.planning.terms import Terms, work_bytes
from edge_run.runtime.processes.forks import forkable_lock
from edge_run.runtime.speculation.draft_model import DraftModel
from edge_run.runtime.streaming.assemble import Streams, WeightMemory, open_streams
from edge_run.runtime.streaming.experts import ExpertStreaming
from edge_run.runtime.streaming.route_recorder import RouteRecorder
from edge_run.runtime.streaming.weights import WeightStreaming
from edge_run.tiers import _libc
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.readers import Readers, ReadTotals
from edge_run.tiers.residency import Residency
from edge_run.tiers.source import SourceFile
from edge_run.tiers.territory import CHUNK_BYTES, Territory
from edge_run.tiers.upload import Upload
from edge_run.tiers.weights import Weights

logger = logging.getLogger(__name__)

_OPENING = forkable_lock()  # one at a time: what an opening holds is what the whole process grew by


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Spare an opening the collector, which goes through all that plans and tables are made of again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Engine:
    """An open model: its decoder, its plan, its figures. One pass at a time; closing is idempotent.

    may_be_whole: a model that fits is read as a whole, and computed without a callback.
    """

    may_be_whole = True

    @system_errors("opening the model")
    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        chunk_bytes: int = CHUNK_BYTES,
        recorder: RouteRecorder | None = None,
        gguf: GgufModel | None = None,
    ) -> None:
        """Open the model at `path`; no weight is read before this returns.

        chunk_bytes: the size of a chunk, a page or a power of two more; smaller ones are for tests. recorder: takes
        part in every pass. gguf: the headers of `path`, where they were read already.
        Raises ModelFileError, BudgetError, KernelError, ConfigError, NotSupported or TierReadError; nothing is left
        open.
        """
        started = time.monotonic()
        self._chunk_bytes = chunk_bytes
        self._ledger = Ledger()
        self.draft: DraftModel | None = None
        with _garbage_collection_paused():
            gguf = gguf or read_gguf(path)
        self._prepared = prepared = prepare(gguf, config, self._ledger)
        self.gguf, self.config, self.budget_bytes = gguf, prepared.config, prepared.budget_bytes
        self.offload, self._profile, reason = prepared.offload, prepared.profile, prepared.why_plain
        self._upload: Upload | None = None
        self._is_warm = False
        self.backend = Backend("llama.cpp", reason) if reason else Backend("edge-run")
        self._driver = Driver()
        self._recorder = recorder
        if recorder:
            self._driver.features.append(recorder)
        self._sources: list[SourceFile] = []
        self._readers: Readers | None = None
        self._streams: Streams = ()
        self._is_unread = not reason
        self.timeline = Timeline(self._share_of_step)
        self.pass_times: PassTimes | None = None
        self._stack = contextlib.ExitStack()
        try:
            with _OPENING, _garbage_collection_paused():
                self.plan: Plan = self._open(is_ours=not reason)
        except BaseException:
            self.close()
            raise
        if self._profile:
            self.expect(self._profile)
        self.load_s = time.monotonic() - started

    @property
    def numerics(self) -> Numerics:
        """The numerics key of this engine."""
        return self.shape.numerics(library_version(), self.offload.key if self.offload else "")

    @property
    def memory_use(self) -> MemoryUse:
        """What the process holds, against its budget."""
        plan, peak_bytes = self.plan, process_memory().peak_bytes
        return MemoryUse(plan.budget_bytes, peak_bytes, plan.pinned_bytes, plan.window_bytes, plan.kv_bytes)

    @property
    def front(self) -> FrontDecoder:
        """The decoder that generating goes through."""
        return self.decoder

    @property
    def mesh_use(self) -> MeshUse | None:
        """How the model was spread over devices; None for one device."""
        return None

    @property
    def read_totals(self) -> ReadTotals:
        """What the readers read so far."""
        return self._readers.totals if self._readers else ReadTotals()

    @property
    def wait_s(self) -> float:
        """Seconds that passes have waited for weights so far."""
        return sum(stream.wait_s for stream in self._streams)

    @property
    def expert_use(self) -> ExpertUse | None:
        """How a mixture was streamed by expert so far; None for all else."""
        return next((stream.use for stream in self._streams if isinstance(stream, ExpertStreaming)), None)

    def expect(self, profile: DeviceProfile) -> None:
        """Let progress be told in seconds, as the device of `profile` would take."""
        planner = Planner(self._prepared) if self._prepared.known else None
        if planner and planner.can_time(profile):
            self.pass_times = planner.times(self.plan, profile, self.gguf.shards[0].path)

    def close(self) -> None:
        """Stop the readers and free everything. Idempotent."""
        streams, self._streams = self._streams, ()
        self._stack.close()
        profile, self._profile = self._profile, None
        if profile:
            note_paces(self.gguf, self.config.cache, part_of(self.offload), self.timeline.paces)
        for stream in streams:
            if isinstance(stream, ExpertStreaming):
                stream.close()
                self._remember(stream)

    def _remember(self, stream: ExpertStreaming) -> None:
        """Keep what was learnt of a mixture for later runs."""
        levers = stream.tuning.found if stream.tuning else {}
        routing.remember(self.gguf, self.config.cache, stream.usage, levers)

    def _open(self, *, is_ours: bool) -> Plan:
        """Open the model; where llama.cpp takes more of a GPU than it had said, with less there."""
        while True:
            if draft := self._prepared.draft:
                self.draft = self._stack.enter_context(DraftModel(draft, self._prepared.draft_offload))
            try:
                return self._open_ours() if is_ours else self._open_plain()
            except OffloadTooLarge as error:
                assert self.offload
                taken_bytes = int(str(error.figures["minimum_bytes"]))
                self._stack.close()
                self.offload = shrink_offload(self.gguf, self.config, self.offload, taken_bytes)
                logger.info("%s; less of the model goes there", error)

    def _open_plain(self) -> Plan:
        self._load([shard.path for shard in self.gguf.shards])
        self._make_context(self._callback(is_needed=False))
        self._make_decoder(self._begin)
        return plan_plain(self._terms(Holdings(0, self._context.kv_bytes)))

    def _open_ours(self) -> Plan:
        self._sources = [self._open_source(number) for number in range(len(self.gguf.shards))]
        for source in self._sources:
            self._stack.callback(source.close)
        if buffered := [source.path for source in self._sources if not source.is_direct]:
            self.backend = Backend(
                "edge-run", f"{buffered[0]}: no direct reads on this file system, so they are buffered"
            )
        spans, _ = load_stubs(self.gguf, self._load, self._chunk_bytes)
        self._territory = territory = Territory(spans, self._chunk_bytes)
        territory.claim()
        self._chunks = territory.holding(host_ranges(self.model)) if self.offload else range(territory.n_chunks)
        weights_bytes = len(self._chunks) * self._territory.chunk_bytes
        room = self.budget_bytes - weights_bytes
        is_resident = self.may_be_whole and self._with_draft(Holdings.now()).total_bytes <= room
        if self.offload and not is_resident:
            self.offload = self.offload.streamed(self.gguf)
        holdings = self._make_context(self._callback(is_needed=not is_resident))
        if is_resident and holdings.total_bytes + weights_bytes > self.budget_bytes:
            self._context.close()
            self.offload = self.offload and self.offload.streamed(self.gguf)
            is_resident, holdings = False, self._make_context(self._callback(is_needed=True))
        self._stack.callback(lambda: self._upload.close() if self._upload else None)  # after the readers
        self._readers = Readers(self.config.readers)
        self._stack.callback(self._readers.close)
        plan = (self._open_resident if is_resident else self._open_streamed)(holdings, self._readers)
        if self.offload:
            self._upload = open_upload(self.model, self.gguf, self._sources, self._readers, self.offload.gpu)
        return plan

    def _open_source(self, shard: int) -> SourceFile:
        return SourceFile(self.gguf.shards[shard].path)

    def _load(
        self,
        paths: list[Path],
        on_header_read: Callable[[], None] | None = None,
        on_upload: Callable[[], None] | None = None,
    ) -> LlamaModel:
        path = self.gguf.shards[0].path
        placement = self.offload.load_placement if self.offload else None
        model = LlamaModel(paths, on_header_read, path=path, placement=placement, on_upload=on_upload)
        self.model = self._stack.enter_context(model)
        check_decoder_only(self.gguf, self.model.has_encoder, self.model.has_decoder)
        self.shape = context_shape(self.config, self.model.trained_context_tokens, compute_threads(self.config.threads))
        self._stack.callback(lambda: self._context.close() if hasattr(self, "_context") else None)
        if self.draft:
            self.draft.check_vocabulary(self.model)
        return model

    def _callback(self, *, is_needed: bool) -> Callable[[int, bool, int], bool] | None:
        return self._driver.callback if is_needed or self._recorder else None

    def _make_context(self, callback: Callable[[int, bool, int], bool] | None) -> Holdings:
        _libc.trim_heap()
        before = process_memory()
        if self.offload and not self._is_warm:
            warm_up(self.model, self.shape, self.budget_bytes)
            self._is_warm = True
        may_copy = self.offload is not None and self.offload.is_wide
        self._context = LlamaContext(self.model, self.shape, callback, may_copy_weights=may_copy)
        self._context.stop_at(self._driver.stop)
        holdings = Holdings.since(before, self._context, work_bytes(self.gguf, self.shape.micro_batch_tokens))
        return self._with_draft(self._with_gpu(holdings))

    def _with_gpu(self, holdings: Holdings) -> Holdings:
        """Return `holdings` with what a GPU takes of the machine's memory, which is to be within its budget."""
        if not self.offload:
            return holdings
        self.offload = self.offload.measured(self._context)
        program_bytes = max(0, holdings.program_bytes - self.offload.process_bytes)
        return self.offload.added_to(replace(holdings, program_bytes=program_bytes))

    def _with_draft(self, holdings: Holdings) -> Holdings:
        """Return `holdings` with what the draft model takes on a line of its own."""
        if not self.draft:
            return holdings
        program_bytes = max(0, holdings.program_bytes - self.draft.resident_bytes)
        return replace(holdings, program_bytes=program_bytes, draft_bytes=self.draft.held_bytes)

    def _terms(self, holdings: Holdings) -> Terms:
        prepared = replace(self._prepared, offload=self.offload)
        return prepared.terms(holdings, self._context.context_tokens, self.shape.micro_batch_tokens)

    def _make_decoder(self, prepare: Callable[[Sequence[BatchToken]], None]) -> None:
        self.decoder = LocalDecoder(self.model, self._context, self._driver, self.shape, prepare, self.timeline)
        self._stack.callback(self.decoder.close)

    def _open_resident(self, holdings: Holdings, readers: Readers) -> Plan:
        """Read everything, in file order; the first pass waits for all of it."""
        everything = self._chunks
        plan = plan_resident(self._terms(holdings), self._territory, everything)
        self._enter_in_ledger(plan)
        states = Residency(self._territory.n_chunks, everything, everything, 0)
        weights = Weights(self._territory, self._sources, readers, states)
        weights.start()

        def prepare(batch: Sequence[BatchToken]) -> None:
            self._begin(batch)
            if self._is_unread:
                weights.acquire(everything, self._driver.check_cancelled)
                self._is_unread = False
                self.timeline.advance()

        self._make_decoder(prepare)
        return plan

    def _open_streamed(self, holdings: Holdings, readers: Readers) -> Plan:
        """Map the graph, plan, and begin to read."""
        self._make_decoder(self._begin)
        cuts = self._follow_cuts()
        graph, terms = self.decoder.map_graph(), self._terms(holdings)
        if cuts:
            self._territory.claim()
        check = self._driver.check_cancelled
        memory = WeightMemory(self._territory, self._sources, readers, self._chunk_bytes, check)
        plan, self._streams = open_streams(graph, terms, memory, self._enter_in_ledger)
        for stream in self._streams:
            if self._recorder and isinstance(stream, ExpertStreaming):
                self._recorder.is_resident = stream.is_resident
            if cuts and isinstance(stream, WeightStreaming):
                self._driver.follow_copies(WeightCopies(cuts, stream))
        self._driver.features += self._streams
        splits = cuts.splits() if cuts else ()
        self._driver.programs[PassShape(1, 1)] = compile_program(graph, self._driver.features, splits)
        return plan

    def _follow_cuts(self) -> CopySchedule | None:
        """Let the driver follow what is copied to a GPU, if anything, and let weights read as zeros meanwhile."""
        if not (self.offload and self.offload.is_wide):
            return None
        cuts = CopySchedule(host_weights(self.model))
        self._driver.follow_cuts(cuts)
        self._territory.blank()
        return cuts

    def _enter_in_ledger(self, plan: Plan) -> None:
        """Let this user's other runs know what `plan` takes. Raises BudgetError when that is more than is free."""
        sizes = {item.what: item.size_bytes for item in plan.items}
        held = sizes["program"] + (self.draft.resident_bytes if self.draft else 0)
        grant = self._ledger.grant(sum(sizes.values()), self.gguf.shards[0].path.name, held_bytes=held)
        self._stack.enter_context(grant)

    def _begin(self, batch: Sequence[BatchToken]) -> None:
        """Look after the files that are still read, and say what the passes of `batch` are expected to take."""
        is_streamed = self.plan.mode == "streamed"
        if is_streamed or self._is_unread:
            for source in self._sources:
                source.check_unchanged()
        if self._upload:
            self._upload.finish(self._driver.check_cancelled)
        steps = pass_steps(self.plan, self.pass_times, len(batch), batch[0].position, self.shape, self._is_unread)
        self.timeline.begin(steps, is_timed=self.pass_times is not None)
        self._is_unread &= not is_streamed

    def _share_of_step(self) -> float:
        if self._is_unread and self.plan.mode == "resident":
            return self.read_totals.bytes_read / max(1, self.plan.model_bytes)
        return self._driver.share_done if self.plan.mode == "streamed" else 0.0
