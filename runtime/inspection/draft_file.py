"""A draft model's file: what it will take, known before it is loaded."""

from __future__ import annotations

from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.units import MIB, format_size, round_up
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.inspection.cache import inspect
from edge_run.runtime.inspection.model_kind import check_kind
from edge_run.runtime.llama.context_shape import context_shape
from edge_run.runtime.llama.library import library_version
from edge_run.tiers.gguf import GgufModel, read_gguf

BEAM = 12  # guesses that are followed up at once
SEQUENCES = 2 * BEAM  # those of one level of a tree, and of the next
MICRO_BATCH_TOKENS = 128
VOCABULARY_BYTES = 320  # of llama.cpp's tables, for each token


class DraftFile:
    """A draft model's file, inspected. size_bytes: what it will take, all in all."""

    def __init__(self, path: Path, config: ModelConfig, target: GgufModel) -> None:
        """Read the header of `path`, and inspect it for `target`, which is opened as `config` says.

        Raises ModelFileError, NotSupported or ConfigError.
        """
        self.gguf = read_gguf(path)
        check_kind(self.gguf)
        self.path = path
        trained, wanted = trained_context_tokens(self.gguf), _context_tokens(config, target)
        self.config = ModelConfig(
            context_tokens=min(wanted, trained) if trained else wanted,
            threads=config.threads,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            sequences=1 if self.gguf.value("attention.sliding_window") else SEQUENCES,
            cache_folder=config.cache_folder,
        )
        known = inspect(self.gguf, self.config, library_version(), is_tried=config.check_file)
        self.context_tokens = known.context_tokens
        vocabulary = VOCABULARY_BYTES * known.vocabulary
        self.size_bytes = self.gguf.data_bytes + known.kv_bytes + known.buffer_bytes + vocabulary

    def host_bytes(self, moved_bytes: int) -> int:
        """Return what it will take of the machine's memory, with `moved_bytes` of it in a GPU's own."""
        return max(0, self.size_bytes - moved_bytes)

    def check_budget(self, budget_bytes: int) -> None:
        """Raise BudgetError where not even the draft model fits."""
        needed = self.size_bytes + process_memory().resident_bytes
        if needed > budget_bytes:
            raise BudgetError(
                f"memory budget {format_size(budget_bytes)}: too small for the draft model {self.path}, which with the "
                f"program takes {round_up(needed, MIB) // MIB} MiB before the model itself has any; raise --memory, "
                "shorten the context (-c), or leave out -md",
                found_bytes=budget_bytes,
                minimum_bytes=round_up(needed, MIB),
            )


def trained_context_tokens(gguf: GgufModel) -> int:
    """Return the longest context that a model was trained on; 0 where its file does not say."""
    tokens = gguf.value("context_length")
    return tokens if isinstance(tokens, int) else 0


def _context_tokens(config: ModelConfig, target: GgufModel) -> int:
    """Return the length of the context that `target` gets."""
    return context_shape(config, trained_context_tokens(target), threads=1).context_tokens
