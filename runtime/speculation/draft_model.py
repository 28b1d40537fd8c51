"""A small model that guesses for a larger one: opened beside it, in memory of its own, inside the same budget.

It is read whole, by llama.cpp, into memory that stays. Its tokens must be the target's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from edge_run.base.closing import Closing
from edge_run.base.errors import NotSupported
from edge_run.base.protocols import BatchToken, Logits
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.decoding.repacked_weights import RepackedWeights
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.decoding.short_pass import map_short_pass
from edge_run.runtime.decoding.twin_context import sparse_cells
from edge_run.runtime.decoding.warm_up import warm_up
from edge_run.runtime.gpu.offload import Offload
from edge_run.runtime.inspection.draft_file import BEAM, MICRO_BATCH_TOKENS, DraftFile
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.runtime.llama.threads import compute_threads
from edge_run.runtime.speculation.drafting import Acceptance, Guess, Guesses, Path

CHOICES = 6  # tokens considered after each guess
LEAST_VALUE = 0.004
MOST_TOKENS_MISSING = 128  # llama.cpp's own tolerance: vocabularies are padded to different lengths
_RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)


class DraftModel(Closing):
    """The drafter. A context manager; one thread at a time.

    resident_bytes: what the process grew by.
    held_bytes: what it will take, with the keys and values of the longest text.
    context_tokens: the longest text that it can follow.
    cells: its keys and values, whose memory is taken as they are written; None where it is taken at once.
    make_room: is told how many tokens stay in the cache, and how many may be in it from now on; returns whether there
        is room for them. It is called between passes of the target only.
    """

    def __init__(
        self, file: DraftFile, offload: Offload | None = None, repacked: Collection[str] = frozenset()
    ) -> None:
        """Load it, on a GPU where `offload` says so. Raises ModelFileError or KernelError; nothing is left open.

        repacked: the kinds of weights that are repacked, where they have a kernel for it here.
        """
        before = process_memory()
        self.path, self.context_tokens = file.path, file.context_tokens
        shape = ContextShape(
            context_tokens=file.context_tokens,
            threads=compute_threads(file.config.threads),
            micro_batch_tokens=min(MICRO_BATCH_TOKENS, file.context_tokens),
            sequences=file.config.sequences,
            outputs_per_pass=file.config.sequences,
            kv_type_k="f16",
            kv_type_v="f16",
            flash_attention="auto",
        )
        self._threads = shape.threads
        self._end: threading.Event | None = None
        with contextlib.ExitStack() as stack:
            paths = [shard.path for shard in file.gguf.shards]
            placement = offload.load_placement if offload else None
            self.model = stack.enter_context(LlamaModel(paths, mode="read", path=file.path, placement=placement))
            if self.model.is_recurrent or self.model.has_encoder or not self.model.has_decoder:
                raise NotSupported(
                    f"draft model {file.path}: {file.gguf.architecture} cannot draft, it is recurrent or has an "
                    "encoder; give another one, or leave out -md"
                )
            if offload:
                warm_up(self.model, shape)
            if repacked:
                weights = RepackedWeights(self.model, file.gguf, map_short_pass(self.model, shape), repacked)
                stack.callback(weights.close)
                weights.repack_now()
            self._context = LlamaContext(self.model, shape, is_sparse=not offload)
            stack.callback(self._context.close)
            self.cells = sparse_cells(self.model, shape, self._context)
            self.make_room: Callable[[int, int], bool] = lambda kept_tokens, most_tokens: True
            self._decoder = LocalDecoder(self.model, self._context, Driver(), shape)
            stack.callback(self._decoder.close)
            self._decoder.decode([BatchToken(0, 0, 0, True)])
            self._decoder.rewind(0, 0)
            self._session = Session(self._decoder)
            self._n_usable = self.model.vocabulary  # less, where the target has fewer tokens
            self._sequences = range(file.config.sequences)
            self._beam = BEAM if self._decoder.capabilities.can_branch else 1
            self._stack = stack.pop_all()
        self.resident_bytes = max(0, process_memory().resident_bytes - before.resident_bytes)
        all_bytes = self.resident_bytes + self._context.untouched_bytes
        self.held_bytes = max(all_bytes, file.host_bytes(offload.moved_bytes if offload else 0))

    def check_vocabulary(self, target: LlamaModel) -> None:
        """Raise NotSupported unless a token means the same in `target`."""
        ours, theirs = self.model.vocabulary, target.vocabulary
        n_common = min(ours, theirs)
        why = f"{ours:,} tokens against {theirs:,}" if abs(ours - theirs) > MOST_TOKENS_MISSING else ""
        if not why and L.llama_vocab_type(self.model.vocab) != L.llama_vocab_type(target.vocab):
            why = "another kind of tokenizer"
        if not why:
            texts = (ggml.token_texts(model.vocab, n_common) for model in (self.model, target))
            differing = (token for token, (a, b) in enumerate(zip(*texts, strict=True)) if a != b)
            if (token := next(differing, None)) is not None:
                why = f"token {token} is another one"
        if why:
            raise NotSupported(
                f"draft model {self.path}: its vocabulary is not that of {target.path} ({why}); give a draft model of "
                "the same family, or leave out -md (--speculate ngram needs none)",
                found=ours,
                needed=theirs,
            )
        self._n_usable = n_common

    def draft(self, history: Sequence[int], most_depth: int, most_guesses: int, acceptance: Acceptance) -> Guesses:
        """Return a tree of likely continuations, level by level; see `Drafter.draft`. Empty where its context is full.

        A level follows up the BEAM most valuable guesses of the one before (one, where the cache cannot branch), as
        long as they are among the `most_guesses` best of all.
        """
        if not self.prepare(history, most_depth):
            return {}
        return self._tree(history, most_depth, most_guesses, acceptance)

    def prepare(self, history: Sequence[int], most_depth: int) -> bool:
        """Have room for `history` and guesses of what follows it; return whether there is. Between passes only.

        Of the text that was followed so far, what `history` begins with stays.
        """
        if len(history) >= self.context_tokens:
            return False
        self._decoder.keep(0, 0, 0, self._sequences[1:])
        held = self._session.history
        common = next((i for i, (a, b) in enumerate(zip(held, history[:-1], strict=False)) if a != b), None)
        if common is None:
            common = min(len(held), len(history) - 1)
        del held[self._decoder.rewind(0, common) :]  # and guesses, which were made in its sequence
        most_tokens = len(history) + (most_depth - 1) * self._beam
        return self.make_room(len(held), min(most_tokens, self.context_tokens))

    def _tree(self, history: Sequence[int], most_depth: int, most_guesses: int, acceptance: Acceptance) -> Guesses:
        room = self.context_tokens - len(history)
        guesses: dict[Path, Guess] = {}
        frontier: dict[Path, int] = {(): 0}
        rows: Logits = self._session.feed(history)[0][np.newaxis]
        for depth in range(1, most_depth + 1):
            level: list[Path] = []
            for path, logits in zip(frontier, rows, strict=True):
                value = guesses[path].value if path else 1.0
                for token, guess in self._choices(logits, value, acceptance):
                    guesses[(*path, token)] = guess
                    level.append((*path, token))
            worst = sorted((guess.value for guess in guesses.values()), reverse=True)[:most_guesses][-1]
            least = max(LEAST_VALUE, worst if len(guesses) >= most_guesses else 0.0)
            level = sorted((path for path in level if guesses[path].value >= least), key=lambda p: -guesses[p].value)
            level = level[: self._beam]
            room -= len(level)
            if not level or depth == most_depth or room < 0 or (self._end and self._end.is_set()):
                break
            frontier = self._grow(level, frontier)
            position = len(history) + depth - 1
            rows = self._decoder.decode(
                [BatchToken(p[-1], position, sequence, True) for p, sequence in frontier.items()]
            )
        return guesses

    def draft_aside(
        self,
        history: Sequence[int],
        most_depth: int,
        most_guesses: int,
        acceptance: Acceptance,
        end: threading.Event,
    ) -> Guesses:
        """Guess as `draft` does, beside a pass: on one core; return what there is soon after `end` is set.

        That there is room was found by `prepare`, before the pass.
        """
        self._end = end
        self._context.use_threads(1)
        try:
            return self._tree(history, most_depth, most_guesses, acceptance)
        finally:
            self._context.use_threads(self._threads)
            self._end = None

    def close(self) -> None:
        """Free it. Idempotent."""
        self._stack.close()

    def _grow(self, level: Sequence[Path], frontier: Mapping[Path, int]) -> dict[Path, int]:
        """Return the sequence of each path of `level`, which follow those of `frontier`, in their sequences.

        The first that follows a path goes on in its sequence; each other one gets one that nobody goes on in.
        """
        parents = {path[:-1] for path in level}
        taken = {frontier[parent] for parent in parents}
        free = [number for number in self._sequences if number not in taken]
        grown: dict[Path, int] = {}
        for path in level:
            sequence = frontier[path[:-1]]
            if sequence in grown.values():
                new = free.pop()
                self._decoder.branch(sequence, [new])
                sequence = new
            grown[path] = sequence
        return grown

    def _choices(self, logits: Logits, value: float, acceptance: Acceptance) -> Iterator[tuple[int, Guess]]:
        """Return the likeliest tokens after a path of `value`, likeliest first."""
        usable = logits[: self._n_usable]
        best = np.argpartition(usable, -CHOICES)[-CHOICES:]
        best = best[np.argsort(-usable[best], kind="stable")]
        highest = float(usable[best[0]])
        rates = np.exp(usable[best] - highest) / float(np.exp(usable - highest).sum())
        for rank, (token, rate) in enumerate(zip(best.tolist(), rates.tolist(), strict=True)):
            kind = ("draft", rank, sum(rate > edge for edge in _RATES))
            yield token, Guess(value * acceptance.chance(kind, rate), kind, rate)
