"""What a process holds besides weights: measured around the making of a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_run.base.config import ModelConfig
from edge_run.base.results import PlanItem
from edge_run.base.units import MIB, round_up
from edge_run.devices.host.memory import ProcessMemory, budgeted_memory
from edge_run.runtime.llama.logit_rows import LOGIT_BYTES
from edge_run.tiers._libc import PAGE

if TYPE_CHECKING:
    from edge_run.runtime.llama.model import LlamaContext

REPACKED_AT_ONCE_BYTES = 512 << 10  # rows that stay in a core's cache; with fewer, Python takes as long as llama.cpp
WORKER_RESERVE_BYTES = 20 * MIB  # of a device that computes layers for others, and makes no text
COORDINATOR_RESERVE_BYTES = 32 * MIB  # of one that makes the text, and talks to the others
TEXT_BYTES, TEXT_BYTES_OF_A_TOKEN = 10 * MIB, 40  # for each token of a vocabulary, what one is drawn from
SHORT_TEXT_TOKENS, BOOK_BYTES = 8192, 256  # that TEXT_BYTES cover; what llama.cpp and we note of each further one
MOST_LOOKUP_TOKENS = 32_768  # of a text, whose runs are looked up (`runtime/speculation/lookup.py`); a power of two
LOOKUP_TOKEN_BYTES = 120


def text_reserve_bytes(vocabulary: int, n_rows: int = 1, context_tokens: int = 0) -> int:
    """Return what is allocated while a text is made, besides what plans know: text, samplers, thread stacks.

    vocabulary: the number of its tokens. n_rows: of logits that are kept at once (`ContextShape.kept_rows`).
    context_tokens: as many as there may be, wherever their keys and values are.
    """
    return TEXT_BYTES + book_bytes(context_tokens) + (TEXT_BYTES_OF_A_TOKEN + LOGIT_BYTES * (n_rows - 1)) * vocabulary


def book_bytes(context_tokens: int) -> int:
    """Return what is noted of each token of a long text, beside its keys and values."""
    return max(0, context_tokens - SHORT_TEXT_TOKENS) * BOOK_BYTES


def lookup_bytes(config: ModelConfig, text_tokens: int) -> int:
    """Return what guessing from texts takes: an index of each, of at most `text_tokens`, and of a conversation."""
    n_texts = config.sequences + 1 if config.uses_lookup else 0
    return n_texts * min(text_tokens, MOST_LOOKUP_TOKENS) * LOOKUP_TOKEN_BYTES


def repacking_bytes(group_bytes: int) -> int:
    """Return what a reader takes to repack weights: a copy of some rows, and what it lacks of those at both ends.

    group_bytes: the size of the rows that are interleaved with each other, at most; 0 where nothing is repacked.
    """
    if not group_bytes:
        return 0
    return round_up(max(REPACKED_AT_ONCE_BYTES, group_bytes), PAGE) + 2 * round_up(group_bytes, PAGE)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the process holds besides weights.

    program_bytes: Python and llama.cpp with its graphs, what is swapped out too. reserve_bytes: for what is allocated
    later. kv_bytes and buffer_bytes: allocated by llama.cpp's context, and counted in full, touched yet or not.
    work_bytes: what matrix multiplications will allocate (`work_buffer.py`). draft_bytes: all that a draft model takes.
    upload_bytes: through which weights reach a GPU; gpu_bytes: what lies on a GPU without memory of its own.
    repacking_bytes: of the readers; copy_bytes: of theirs too, where a copy of the model is read. lookup_bytes: to
    guess from the text.
    """

    program_bytes: int
    reserve_bytes: int
    kv_bytes: int = 0
    buffer_bytes: int = 0
    work_bytes: int = 0
    draft_bytes: int = 0
    upload_bytes: int = 0
    gpu_bytes: int = 0
    repacking_bytes: int = 0
    copy_bytes: int = 0
    lookup_bytes: int = 0

    @classmethod
    def now(cls, vocabulary: int) -> Holdings:
        """Return what is held before there is a context."""
        return cls(budgeted_memory().taken_bytes, text_reserve_bytes(vocabulary))

    @classmethod
    def since(cls, before: ProcessMemory, context: LlamaContext, work_bytes: int, reserve_bytes: int) -> Holdings:
        """Return what is held after `context` was made; besides its buffers it takes what memory grew by.

        before: the `budgeted_memory` before that.
        """
        after, cleared_bytes = budgeted_memory(), context.kv_bytes - context.untouched_bytes
        if not context.buffer_bytes:
            buffers = max(after.data_bytes - before.data_bytes, after.taken_bytes - before.taken_bytes)
            return cls(
                before.taken_bytes, reserve_bytes, context.kv_bytes, max(0, buffers - context.kv_bytes), work_bytes
            )
        graphs = max(0, after.taken_bytes - before.taken_bytes - cleared_bytes)
        program_bytes = before.taken_bytes + graphs
        return cls(program_bytes, reserve_bytes, context.kv_bytes, context.buffer_bytes, work_bytes)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(item.size_bytes for item in self.items())

    def items(self) -> tuple[PlanItem, ...]:
        """Return the plan's lines for all but weights."""
        for_some_runs = (
            PlanItem("draft", self.draft_bytes, "the draft model: weights, keys and values, buffers, vocabulary"),
            PlanItem("gpu", self.gpu_bytes, "what lies on the GPU, which has no memory of its own"),
            PlanItem("upload", self.upload_bytes, "through which weights reach the GPU"),
            PlanItem("also", self.copy_bytes, "buffers between two drives and the weights"),
            PlanItem("repacking", self.repacking_bytes, "rows that the readers are repacking"),
            PlanItem("lookup", self.lookup_bytes, "where runs of tokens were in the text before, to guess from it"),
        )
        return (
            *(item for item in for_some_runs if item.size_bytes),
            PlanItem("program", self.program_bytes, "Python, llama.cpp and the vocabulary"),
            PlanItem("kv", self.kv_bytes, "the context's keys and values"),
            PlanItem("buffers", self.buffer_bytes, "llama.cpp's compute and output buffers, as it reports them"),
            PlanItem("work", self.work_bytes, "for matrix multiplications: converted inputs, tiles of weights"),
            PlanItem("reserve", self.reserve_bytes, "for what is allocated later: text, samplers, thread stacks"),
        )
