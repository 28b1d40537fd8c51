"""A draft model's file: what it will take, known before it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.config import MOST_CONTEXT_TOKENS, ModelConfig
from edge_run.base.errors import BudgetError, NotSupported, not_opened, option, reason_of
from edge_run.base.units import MIB, format_size, round_down, round_up
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.memory import budgeted_memory
from edge_run.runtime.inspection.cache import inspect
from edge_run.runtime.inspection.inspection import Inspection
from edge_run.runtime.inspection.learned_positions import learned_positions
from edge_run.runtime.inspection.model_kind import check_generates, check_kind
from edge_run.runtime.llama.context_shape import CELLS_STEP, context_shape
from edge_run.runtime.llama.library import library_build
from edge_run.runtime.llama.logit_rows import LOGIT_BYTES, idle_row_bytes
from edge_run.runtime.llama.work_buffer import work_bytes
from edge_run.tiers._libc import PAGE
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.gguf_header import ArrayValue, MetadataEntry
from edge_run.tiers.kv.cells import LEAST_SPARSE_BYTES, Cells

BEAM = 12  # guesses that are followed up at once
SEQUENCES = 2 * BEAM  # at least: of texts, and of what is followed up besides
MOST_SEQUENCES = 256  # that llama.cpp has
MOST_DEPTH = 16  # of a path of guesses
GUESSED_TOKENS = (MOST_DEPTH + 1) * (1 + BEAM)  # beside the text at most: a path that is verified, what may follow it
MICRO_BATCH_TOKENS = 128
VOCABULARY_BYTES = 320  # of llama.cpp's tables, for each token
NO_VOCABULARY_BYTES = 40  # for each token where it has only their number
MOST_TOKENS_MISSING = 128  # llama.cpp's own tolerance: vocabularies are padded to different lengths
_TOKENS, _TOKENIZER = "tokenizer.ggml.tokens", "tokenizer.ggml.model"
_ARRAY_HEAD_BYTES = 8 + 4 + 4 + 8  # of an entry with an array: lengths and types, beside the key
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DraftFile:
    """A draft model's file, inspected.

    gguf: its header.
    config: the configuration that it is opened with.
    known: the result of the inspection.
    most_texts: as many texts can be followed at once.
    has_target_tokens: whether its tokens are the target's, so that it is opened without a vocabulary of its own.
    """

    gguf: GgufModel
    config: ModelConfig
    known: Inspection
    most_texts: int = 1
    has_target_tokens: bool = False

    @classmethod
    def read(cls, path: Path, config: ModelConfig, target: GgufModel, *, is_tried: bool) -> DraftFile:
        """Read the header of `path`, and inspect it for `target`, which is opened as `config` says.

        is_tried: as of `inspect`. Raises ModelFileError, NotSupported or ConfigError.
        """
        gguf = read_gguf(path)
        check_kind(gguf)
        check_generates(gguf)
        n_texts = min(config.sequences, MOST_SEQUENCES - BEAM)
        table = learned_positions(gguf)  # of which llama.cpp's context, whole steps long, must not be longer
        if 0 < table < CELLS_STEP:
            raise NotSupported(
                f"draft model {path}: has learned positions for {table} tokens, {CELLS_STEP} are needed; give another "
                f"one, or leave out {option('draft')}",
                found=table,
                needed=CELLS_STEP,
            )
        positions = round_down(table, CELLS_STEP) or trained_context_tokens(gguf)
        longest, wanted = min(trained_context_tokens(gguf) or positions, positions), _context_tokens(config, target)
        own = ModelConfig(
            context_tokens=min(wanted, longest) if longest else wanted,
            threads=config.threads,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            sequences=n_texts if gguf.value("attention.sliding_window") else max(SEQUENCES, n_texts + BEAM),
            cache_folder=config.cache_folder,
        )
        known = inspect(gguf, own, library_build(), is_tried=is_tried)
        return cls(gguf, own, known, n_texts, has_same_tokens(gguf, target))

    @property
    def path(self) -> Path:
        """The file, or the first of several."""
        return self.gguf.shards[0].path

    @property
    def context_tokens(self) -> int:
        """The longest text that it can follow."""
        return self.known.context_tokens

    @property
    def size_bytes(self) -> int:
        """What it will take, all in all."""
        of_a_token = NO_VOCABULARY_BYTES if self.has_target_tokens else VOCABULARY_BYTES
        of_a_token += LOGIT_BYTES * self.config.sequences  # a row of logits for each
        work = work_bytes(self.gguf, MICRO_BATCH_TOKENS, compute_threads(self.config.threads))
        known = self.known
        return self.gguf.data_bytes + known.kv_bytes + known.buffer_bytes + work + of_a_token * known.vocabulary

    @property
    def idle_bytes(self) -> int:
        """What it frees at least while it rests: whole pages inside each tensor, and rows of logits."""
        weights = sum(max(0, tensor.size_bytes - 2 * PAGE) for tensor in self.gguf.tensors)
        return weights + idle_row_bytes(self.config.sequences, self.known.vocabulary)

    @property
    def cells(self) -> Cells | None:
        """Its keys and values, whose memory is taken as they are written; None where it is taken at once."""
        return self.known.cells if self.known.cell_bytes >= LEAST_SPARSE_BYTES else None

    @property
    def least_bytes(self) -> int:
        """What it will take before it has read a text."""
        return self.size_bytes - (self.known.cell_bytes if self.cells else 0)

    def host_bytes(self, moved_bytes: int) -> int:
        """Return what it will take of the machine's memory, with `moved_bytes` of it in a GPU's own."""
        return max(0, self.size_bytes - moved_bytes)

    def check_budget(self, budget_bytes: int, moved_bytes: int = 0) -> None:
        """Raise BudgetError where not even the draft model fits.

        moved_bytes: as of `host_bytes`; of a model that is on a GPU, no keys and values are lent.
        """
        own_bytes = self.host_bytes(moved_bytes) if moved_bytes else self.least_bytes
        needed = own_bytes + budgeted_memory().taken_bytes
        if needed > budget_bytes:
            raise BudgetError(
                f"memory budget {format_size(budget_bytes)}: too small for the draft model {self.path}, which with the "
                f"program takes {round_up(needed, MIB) // MIB} MiB before the model itself has any; raise "
                f"{option('memory')}, shorten the context ({option('context_tokens')}), or leave out {option('draft')}",
                found_bytes=budget_bytes,
                minimum_bytes=round_up(needed, MIB),
            )


def trained_context_tokens(gguf: GgufModel) -> int:
    """Return the longest context that a model was trained on; 0 where its file does not say, or what none can be."""
    tokens = gguf.value("context_length")
    return tokens if isinstance(tokens, int) and 0 < tokens <= MOST_CONTEXT_TOKENS else 0


def _context_tokens(config: ModelConfig, target: GgufModel) -> int:
    """Return the length of the context that `target` gets."""
    return context_shape(config, trained_context_tokens(target), threads=1).context_tokens


def has_same_tokens(one: GgufModel, other: GgufModel) -> bool:
    """Return whether two models have the same tokens, but for a few that one has more of at the end.

    Raises ModelFileError where a file cannot be read any more.
    """
    first, second = ({entry.key: entry for entry in gguf.entries} for gguf in (one, other))
    if one.metadata.get(_TOKENIZER) != other.metadata.get(_TOKENIZER) or not (_TOKENS in first and _TOKENS in second):
        return False
    entries = first[_TOKENS], second[_TOKENS]
    counts = [entry.value.count if isinstance(entry.value, ArrayValue) else 0 for entry in entries]
    if abs(counts[0] - counts[1]) > MOST_TOKENS_MISSING or not all(counts):
        return False
    n_bytes = min(entry.size_bytes for entry in entries) - _ARRAY_HEAD_BYTES - len(_TOKENS)
    blocks = [_blocks(gguf.shards[0].path, entry, n_bytes) for gguf, entry in zip((one, other), entries, strict=True)]
    return all(ours == theirs for ours, theirs in zip(*blocks, strict=True))


def _blocks(path: Path, entry: MetadataEntry, n_bytes: int) -> Iterator[bytes]:
    """Yield the first `n_bytes` of an array's elements, as the file has them, in blocks."""
    try:
        with path.open("rb") as file:
            file.seek(entry.start + _ARRAY_HEAD_BYTES + len(entry.key))
            for start in range(0, n_bytes, _BLOCK_BYTES):
                yield file.read(min(_BLOCK_BYTES, n_bytes - start))
    except OSError as error:
        raise not_opened(error, f"{path}: cannot be read ({reason_of(error)}); check its permissions") from error
