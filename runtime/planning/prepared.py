"""A model before it is opened or planned: the facts from its files, and the parts that go to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_run.base.config import ModelConfig
from edge_run.base.profile import DeviceProfile
from edge_run.partition.window import SEGMENT_CHUNKS
from edge_run.runtime.forecasting import routing
from edge_run.runtime.graph.segments import SLICED_SEGMENTS
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.runtime.inspection.inspection import Inspection
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.llama.logit_rows import LOGIT_BYTES
from edge_run.runtime.llama.work_buffer import converted_bytes, tile_bytes, work_token_bytes
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.address_space import MappedSpan
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.kv.cells import Cells
from edge_run.tiers.packed_file import PackedFile

if TYPE_CHECKING:
    from edge_run.runtime.gpu.offload import Offload
    from edge_run.runtime.planning.experts import Cuts
    from edge_run.runtime.probing.attention import AttentionRatio


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model, and how it is to be run.

    gguf: its headers.
    config: the configuration, with room for guesses.
    budget_bytes: the memory budget.
    why_plain: why llama.cpp's own loader runs the model; empty where ours does.
    draft: the headers of the draft model.
    packed: the packed file of its experts.
    known: the result of the inspection; None where the file was not inspected.
    offload: the part of the model that goes to a GPU.
    draft_offload: the part of the draft model that goes to a GPU.
    profile: the profile of this device, where it decided what goes to a GPU.
    kv_type_reason: the type of keys and values, and what was weighed, where that was left open; else empty.
    attention: the speed of attention on them in narrow and in wide passes, over that on 16 bits, where it was measured
        (`known_ratio`).
    repacked: the kinds of weights that are to be repacked where all weights fit.
    repacked_streamed: the same where weights stream, and are repacked as often as they are read.
    repacked_file: holds weights repacked, to be read so where they stream.
    wanted_context_tokens: the context that was asked for, where the budget has room for a shorter one; else 0.
    cuts: what plans of the model share, while it is prepared; None where it is open, as they take some MB.
    """

    gguf: GgufModel
    config: ModelConfig
    budget_bytes: int
    why_plain: str = ""
    draft: DraftFile | None = None
    packed: PackedFile | None = None
    known: Inspection | None = None
    offload: Offload | None = None
    draft_offload: Offload | None = None
    profile: DeviceProfile | None = None
    wanted_context_tokens: int = 0
    repacked: frozenset[str] = frozenset()
    repacked_streamed: frozenset[str] = frozenset()
    repacked_file: PackedFile | None = None
    kv_type_reason: str = ""
    attention: AttentionRatio | None = None
    cuts: Cuts | None = None

    @property
    def why_nothing_kept(self) -> str:
        """Why no prompts can be kept, as far as that is known before the model is opened; empty where they can."""
        if self.why_plain:
            return f"llama.cpp's own loader runs this model ({self.why_plain})"
        return "keys and values lie on the GPU" if self.offload else ""

    @property
    def draft_idle_bytes(self) -> int:
        """What the draft model gives back while it rests; nothing of what is on a GPU.

        A mixture has no use for it: how many experts it has frames for is planned once.
        """
        if self.draft is None or self.draft_offload or self.gguf.is_mixture:
            return 0
        return self.draft.idle_bytes

    def staying(self, spans: Sequence[MappedSpan]) -> list[tuple[int, int]]:
        """Return (address, length) of those weights in `spans` that must not leave memory between passes.

        These are the factors of rotary embeddings where a full context is shifted: llama.cpp turns keys with them
        before a pass, when no segment of it is held yet.
        """
        factors = [one for one in self.gguf.tensors if self.config.context_shift and ".rope_f" in f".{one.name}"]
        return [
            (span.base + one.offset, one.size_bytes)
            for one in factors
            for span in spans
            if span.shard == one.shard and span.start <= span.base + one.offset < span.stop
        ]

    def terms(self, holdings: Holdings, context_tokens: int, micro_batch_tokens: int) -> Terms:
        """Return the terms of a plan, for a process that holds `holdings` besides weights."""
        config = self.config
        return Terms(
            gguf=self.gguf,
            budget_bytes=self.budget_bytes,
            holdings=holdings,
            context_tokens=context_tokens,
            wanted_context_tokens=self.wanted_context_tokens or context_tokens,
            micro_batch_tokens=micro_batch_tokens,
            readers=config.readers,
            experience=routing.recall(self.gguf, config.cache),
            expert_policy=config.expert_policy,
            expert_prefetch=config.expert_prefetch,
            gpu=self.offload.plan if self.offload else None,
            packed=self.packed,
            kv_type_reason=self.kv_type_reason,
            sequences=config.sequences,
        )

    def lending(
        self,
        terms: Terms,
        shape: ContextShape,
        chunk_bytes: int,
        cells: Cells | None,
        draft_cells: Cells | None,
        idle_bytes: int,
        vocabulary: int,
    ) -> Terms:
        """Return `terms` where weights borrow what passes leave, and large products are computed in row slices.

        shape: of the context. chunk_bytes: the size of a chunk. cells, draft_cells, idle_bytes: as of `Terms`.
        vocabulary: the number of its tokens.
        """
        lent = replace(terms, cells=cells, draft_cells=draft_cells, idle_bytes=idle_bytes)
        lent = replace(lent, draft_idle_bytes=self.draft_idle_bytes, verified_tokens=shape.verified_tokens)
        if not shape.pooling:
            lent = replace(lent, row_bytes=2 * LOGIT_BYTES * vocabulary, most_rows=shape.kept_rows)
        return _with_row_slices(lent, chunk_bytes, shape.narrow_tokens, shape.threads)


def _with_row_slices(terms: Terms, chunk_bytes: int, narrow_tokens: int, threads: int) -> Terms:
    """Return `terms` with row slices, whose products convert their inputs in memory of their own.

    chunk_bytes: the size of a chunk. narrow_tokens: the tokens of a pass, at most, beside which work is lent.
    threads: that compute.
    """
    least_bytes = SLICED_SEGMENTS * SEGMENT_CHUNKS * chunk_bytes
    sliced = [t for t in terms.gguf.tensors if len(t.shape) > 2 or t.size_bytes > least_bytes]
    n_used = terms.gguf.used_experts
    sliced_token_bytes = max((converted_bytes(tensor, n_used) for tensor in sliced), default=0)
    sliced_bytes = terms.micro_batch_tokens * sliced_token_bytes + tile_bytes(sliced, threads)
    work_bytes = terms.holdings.work_bytes + sliced_bytes
    return replace(
        terms,
        holdings=replace(terms.holdings, work_bytes=work_bytes),
        has_row_slices=True,
        narrow_tokens=narrow_tokens,
        work_token_bytes=work_token_bytes(terms.gguf),
        sliced_token_bytes=sliced_token_bytes,
    )
