"""The terms of a plan: a model, a budget, and the memory that is not for weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_run.base.results import GpuPlan
from edge_run.runtime.forecasting.routing import Experience
from edge_run.runtime.inspection.draft_file import GUESSED_TOKENS
from edge_run.runtime.llama.holdings import Holdings
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.kv.cells import Cells
from edge_run.tiers.kv.spill_shape import SpillShape
from edge_run.tiers.packed_file import PackedFile

_CONTEXT_STEPS = (0, 1024, 4096, 16_384, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms under which a model's weights are placed, and what keys, values and loans take by them.

    gguf: the headers of the model.
    budget_bytes: the memory budget.
    holdings: the memory that the process holds besides weights.
    context_tokens: the tokens of a context.
    micro_batch_tokens: the tokens of a full pass.
    readers: the number of reader threads.
    experience: how experts were chosen, and best read, in earlier runs.
    expert_policy: as in `ModelConfig`.
    expert_prefetch: as in `ModelConfig`.
    gpu: the part of the model that lies on a GPU, and needs no place.
    packed: the packed file of the experts.
    cells: the context's keys and values; None where they take all their memory at once.
    draft_cells: those of the draft model; None where there is none, or they take all their memory at once.
    draft_idle_bytes: what it gives back while it rests, its weights above all.
    idle_bytes: the part of the buffers that passes of few tokens do not touch.
    row_bytes: what the logits of a token take; 0 where their memory is not lent.
    most_rows: the tokens in a pass, at most, that have logits.
    verified_tokens: the guesses in a pass at most, each of which takes a cell.
    wanted_context_tokens: the context that was asked for; the budget may have room for fewer tokens.
    is_shared: other devices compute layers for the same context, so this one cannot make it shorter.
    has_row_slices: whether products with large matrices are computed in slices of rows.
    narrow_tokens: the tokens of a pass, at most, that makes a token or verifies guesses; 0 where work is not lent.
    work_token_bytes: of work, what a token of a pass takes, and ggml keeps for as many as its widest pass had.
    sliced_token_bytes: the same of products in row slices, whose work is freed after each wide pass.
    repacked: the kinds of weights that are repacked.
    is_read_repacked: whether those that a packed file holds are read repacked.
    spill: what of keys and values may be away in a file; None where all stay in memory.
    away_bytes: what of them is away when the context is full.
    kv_type_reason: their type, and what was weighed, where that was left open.
    sequences: the answers that may share passes.
    """

    gguf: GgufModel
    budget_bytes: int
    holdings: Holdings
    context_tokens: int
    micro_batch_tokens: int
    readers: int
    experience: Experience = field(default_factory=Experience)
    expert_policy: str = "default"
    expert_prefetch: str = "auto"
    gpu: GpuPlan | None = None
    packed: PackedFile | None = None
    cells: Cells | None = None
    draft_cells: Cells | None = None
    draft_idle_bytes: int = 0
    idle_bytes: int = 0
    row_bytes: int = 0
    most_rows: int = 1
    verified_tokens: int = 0
    wanted_context_tokens: int = 0
    is_shared: bool = False
    has_row_slices: bool = False
    narrow_tokens: int = 0
    work_token_bytes: int = 0
    sliced_token_bytes: int = 0
    repacked: tuple[str, ...] = ()
    is_read_repacked: bool = False
    spill: SpillShape | None = None
    away_bytes: int = 0
    kv_type_reason: str = ""
    sequences: int = 1

    @property
    def lent_bytes(self) -> int:
        """What weights may have before anything is written into the context, while passes are of few tokens."""
        return max(0, self.most_lent_bytes - self.draft_idle_bytes - self._text_row_bytes)

    @property
    def most_lent_bytes(self) -> int:
        """The same for a pass of one text, while a draft model rests."""
        return max(0, self.pool_bytes - self.cell_bytes(1))

    @property
    def pool_bytes(self) -> int:
        """What is divided anew before each pass: buffers and work where idle, what a draft gives back, and cells."""
        sliced_bytes = self._wide_bytes(self.micro_batch_tokens, self.sliced_token_bytes)
        work_bytes = self._kept_work_bytes(self.micro_batch_tokens) + sliced_bytes
        row_bytes = self._row_bytes(self.most_rows)
        return self.idle_bytes + row_bytes + work_bytes + self.draft_idle_bytes + self._full_cell_bytes

    @property
    def _text_row_bytes(self) -> int:
        """Where all texts share a pass that makes a token of each."""
        return self._row_bytes(min(self.sequences, self.most_rows))

    def _row_bytes(self, n_rows: int) -> int:
        return (n_rows - 1) * self.row_bytes

    @property
    def _full_cell_bytes(self) -> int:
        return self.cell_bytes(self.context_tokens)

    def _wide_bytes(self, n_tokens: int, token_bytes: int) -> int:
        return max(0, n_tokens - self.narrow_tokens) * token_bytes if self.narrow_tokens else 0

    def _kept_work_bytes(self, widest_tokens: int) -> int:
        """Return the work beyond that of narrow passes which stays after a pass of `widest_tokens` tokens."""
        return self._wide_bytes(widest_tokens, self.work_token_bytes)

    def cell_bytes(self, tokens: int) -> int:
        """Return what keys and values of `tokens` tokens take in memory, with those of guesses: the draft's too."""
        return self.held_cell_bytes(tokens) + self.draft_cell_bytes(tokens)

    def held_cell_bytes(self, tokens: int) -> int:
        """Return what those of the model take in memory."""
        taken = self._own_cell_bytes(tokens)
        return min(taken, self._own_cell_bytes(self.context_tokens) - self.away_bytes) if self.away_bytes else taken

    def draft_cell_bytes(self, tokens: int) -> int:
        """Return what those of the draft model take."""
        return self.draft_cells.bytes_for(tokens + GUESSED_TOKENS) if self.draft_cells else 0

    def _own_cell_bytes(self, tokens: int) -> int:
        """Return what those of the model take, wherever they are."""
        return self.cells.bytes_for(tokens + self.verified_tokens) if self.cells else 0

    def kv_read_at(self, tokens: int) -> int:
        """Return what a token reads of keys and values that are away, when the context has `tokens` tokens."""
        if not self.spill or not self.away_bytes:
            return 0
        return self.spill.read_at(tokens, self.held_cell_bytes(self.context_tokens))

    def loans_at(self, tokens: int, loan_bytes: int) -> int:
        """Return the loans of `loan_bytes` that weights may have while the context has `tokens` tokens.

        These were read in passes as wide as can be.
        """
        kept_bytes = self._kept_work_bytes(min(tokens, self.micro_batch_tokens)) + self.draft_idle_bytes
        kept_bytes += self._text_row_bytes
        return max(0, self.pool_bytes - kept_bytes - self.cell_bytes(tokens + 1)) // loan_bytes

    @property
    def context_steps(self) -> list[int]:
        """The tokens in a context for which a plan says what it holds: none, all, and some between."""
        return [*(tokens for tokens in _CONTEXT_STEPS if tokens < self.context_tokens - 1), self.context_tokens - 1]

    @property
    def packed_bytes(self) -> int:
        """The memory that reading packed experts takes besides the experts."""
        return self.packed.memory_bytes(self.readers) if self.packed else 0
