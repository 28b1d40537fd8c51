"""A small model that guesses for a larger one: opened beside it, in memory of its own, inside the same budget.

It is read whole, by llama.cpp, into memory that stays; where its tokens are the target's, without its vocabulary.
Where they are others, guesses go through text.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from edge_run.base.closing import Closing
from edge_run.base.errors import Cancelled, NotSupported, option
from edge_run.base.interrupt import Interrupt
from edge_run.base.protocols import BatchToken
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.memory import budgeted_memory
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.decoding.repacked_weights import RepackedWeights
from edge_run.runtime.decoding.short_pass import map_short_pass
from edge_run.runtime.decoding.twin_context import sparse_cells
from edge_run.runtime.decoding.warm_up import usual_passes, warm_up
from edge_run.runtime.gpu.offload import Offload
from edge_run.runtime.inspection.draft_file import BEAM, MICRO_BATCH_TOKENS, MOST_DEPTH, DraftFile
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.runtime.speculation.draft_texts import DraftTexts
from edge_run.runtime.speculation.draft_trees import DraftTrees
from edge_run.runtime.speculation.draft_weights import DraftWeights
from edge_run.runtime.speculation.drafting import Guesses, WantedGuesses
from edge_run.runtime.speculation.translation import Translation
from edge_run.tiers.stub import outline_metadata


class DraftModel(Closing):
    """The drafter. A context manager; one thread at a time.

    taken_bytes: what the process grew by.
    held_bytes: what it will take, with the keys and values of the longest text.
    context_tokens: the longest text that it can follow.
    most_texts: as many texts can be followed at once.
    once_s: of the latest guesses, the seconds that others do not take: texts were read, or weights that had left.
    weights: which may leave until something is to be guessed; None on a GPU.
    cells: its keys and values, whose memory is taken as they are written; None where it is taken at once.
    make_room: is told how many tokens stay in the cache, and how many may be in it from now on; returns whether there
        is room for them, and for the weights. It is called between passes of the target only.
    """

    def __init__(
        self,
        file: DraftFile,
        offload: Offload | None = None,
        repacked: Collection[str] = frozenset(),
        interrupt: Interrupt | None = None,
    ) -> None:
        """Load it, on a GPU where `offload` says so. Raises ModelFileError or KernelError; nothing is left open.

        repacked: the kinds of weights that are repacked, where they have a kernel for it here.
        interrupt: that of the target, which ends passes of the draft model too, as they can be many.
        """
        before = budgeted_memory()
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
        self._threads, self._interrupt = shape.threads, interrupt or Interrupt()
        with contextlib.ExitStack() as stack:
            paths = [shard.path for shard in file.gguf.shards]
            placement = offload.load_placement if offload else None
            self._has_target_tokens = file.has_target_tokens
            instead = outline_metadata(file.gguf) if file.has_target_tokens else None
            self.model = LlamaModel(paths, None, instead, "read", file.path, placement, self._interrupt.check)
            stack.enter_context(self.model)
            if self.model.is_recurrent or self.model.has_encoder or not self.model.has_decoder:
                raise NotSupported(
                    f"draft model {file.path}: {file.gguf.architecture} cannot draft, it is recurrent or has an "
                    f"encoder; give another one, or leave out {option('draft')}"
                )
            if offload:
                passes = usual_passes(shape.micro_batch_tokens, is_software=offload.gpu.is_software)
                warm_up(self.model, shape, passes)
            kernels: RepackedWeights | None = None
            if repacked:
                kernels = RepackedWeights(self.model, file.gguf, map_short_pass(self.model, shape), repacked)
                stack.callback(kernels.close)
                kernels.repack_now()
            self.weights = None if offload else DraftWeights(self.model, file.gguf, kernels, self._interrupt.check)
            self._context = LlamaContext(self.model, shape, is_sparse=not offload)
            stack.callback(self._context.close)
            self.cells = sparse_cells(self.model, shape, self._context)
            self.make_room: Callable[[int, int], bool] = lambda kept_tokens, most_tokens: True
            driver = Driver()
            driver.before_pass = lambda shape: self._interrupt.check()
            self._decoder = LocalDecoder(self.model, self._context, driver, shape)
            stack.callback(self._decoder.close)
            self._decoder.decode([BatchToken(0, 0, 0, True)])
            self._decoder.rewind(0, 0)
            self.most_texts, self.once_s = file.most_texts, 0.0
            self._texts = DraftTexts(self._decoder, file.most_texts, self.context_tokens)
            branches = range(file.most_texts, file.config.sequences) if self._decoder.capabilities.can_branch else ()
            self._trees = DraftTrees(self._decoder, branches, BEAM, self.model.vocabulary)
            self._translation: Translation | None = None
            self._stack = stack.pop_all()
        self.taken_bytes = max(0, budgeted_memory().taken_bytes - before.taken_bytes)
        all_bytes = self.taken_bytes + self._context.untouched_bytes
        self.held_bytes = max(all_bytes, file.host_bytes(offload.moved_bytes if offload else 0))

    def follow_vocabulary(self, target: LlamaModel) -> None:
        """Guess in the tokens of `target`, through text where they are others.

        Raises NotSupported where one of the two has no text.
        """
        ours, theirs = self.model.vocabulary, target.vocabulary
        if self._has_target_tokens:
            self._trees.n_usable = min(ours, theirs)
            return
        self._translation = Translation(self.model, target)
        if not self._translation.is_possible:
            raise NotSupported(
                f"draft model {self.path}: its vocabulary is not that of {target.path} ({ours:,} tokens against "
                f"{theirs:,}), and one of the two has no text to go by; give a draft of the same family, or leave "
                f"out {option('draft')} ({option('speculate', 'ngram')} needs none)",
                found=ours,
                needed=theirs,
            )

    @property
    def is_translated(self) -> bool:
        """Whether its tokens are others than the target's."""
        return self._translation is not None

    def draft_many(self, texts: Mapping[int, Sequence[int]], wanted: WantedGuesses) -> dict[int, Guesses]:
        """Return likely continuations of texts, by their numbers.

        The passes for them are shared. Numbers are below `most_texts`; a text that has the number of an earlier one
        goes on where that one was alike. There is none of a text that has no room. Raises Cancelled.
        """
        ours, self.once_s = self._ours(texts), 0.0
        with self._hearing():
            if not (followed := self._prepare(ours, wanted.most_depth)):
                return {}
            return self._grow({number: ours[number] for number in followed}, wanted)

    def limit(self, n_cells: int) -> None:
        """Have texts and guesses take at most `n_cells` cells, as many as have room."""
        self._texts.most_cells = min(self.context_tokens, n_cells)

    def belong(self, number: int, salt: str) -> None:
        """Have a number serve texts of `salt` from now on; what was read for others does not. Between passes only."""
        self._texts.belong(number, salt)

    def n_unread(self, number: int, text: Sequence[int]) -> int:
        """Return how many tokens of a text would have to be read before anything of it is guessed."""
        return sum(self._texts.n_unread(number, ours) for ours in self._ours({number: text}).values())

    def prepare(self, texts: Mapping[int, Sequence[int]], most_depth: int) -> bool:
        """Have room for texts and guesses of what follows them; return whether there is. Between passes only.

        Of the texts that were followed so far, what these begin with stays.
        """
        with self._hearing():
            return len(self._prepare(self._ours(texts), most_depth)) == len(texts)

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """End the block where the target's work is to end; Ctrl-C waits until what is begun in it is whole."""
        try:
            with self._interrupt.hearing_signals():
                yield
        except Cancelled:
            self._interrupt.reset()  # it was for this, as it is for a batch
            raise

    def _ours(self, texts: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
        """Return texts in its own tokens; those are left out that it cannot follow now."""
        if self._translation is None:
            return _within(texts, self.model.vocabulary)
        translated = {number: self._translation.text(text) for number, text in texts.items()}
        return {number: text for number, text in translated.items() if text}

    def _prepare(self, texts: Mapping[int, Sequence[int]], most_depth: int) -> tuple[int, ...]:
        self._decoder.keep(0, 0, 0, self._trees.branches)
        room = self._texts.follow(texts, (most_depth - 1) * (BEAM if self._trees.branches else len(texts)))
        if not (room.texts and self.make_room(room.kept_cells, room.most_cells)):
            return ()
        if self.weights and self.weights.have_left:
            started = time.monotonic()
            self.weights.come_back()
            self.once_s += time.monotonic() - started
        return room.texts

    def _grow(self, texts: Mapping[int, Sequence[int]], wanted: WantedGuesses) -> dict[int, Guesses]:
        started = time.monotonic()
        rows = self._texts.read(texts)
        if self._texts.n_read > (MOST_DEPTH + 1) * len(texts):  # more than came with a pass
            self.once_s += time.monotonic() - started
        lengths = {number: len(text) for number, text in texts.items()}
        n_cells = self._texts.most_cells - self._texts.n_held
        found = self._trees.grow(lengths, rows, n_cells, wanted)
        if (translation := self._translation) is None:
            return found
        return {number: translation.guesses(guesses, wanted.most_depth) for number, guesses in found.items()}

    def draft_aside(
        self, texts: Mapping[int, Sequence[int]], wanted: WantedGuesses, end: threading.Event
    ) -> dict[int, Guesses]:
        """Guess as `draft_many` does, beside a pass: on one core; return what there is soon after `end` is set.

        That there is room was found by `prepare`, before the pass.
        """
        self._trees.end = end
        self._context.use_threads(1)
        try:
            return self._grow(self._ours(texts), wanted)
        finally:
            self._context.use_threads(self._threads)
            self._trees.end = None

    def rest(self) -> None:
        """Give back what it can do without until it is to guess, if there is a use for it. Between passes only."""
        if self.weights and self.weights.on_leave:
            self._context.rows.free()  # first: what has left is lent
            self.weights.leave()

    def close(self) -> None:
        """Free it. Idempotent."""
        self._stack.close()


def _within(texts: Mapping[int, Sequence[int]], vocabulary: int) -> Mapping[int, Sequence[int]]:
    """Return texts with another token for each that only the target has: what follows is guessed as after that one."""
    if all(max(text, default=0) < vocabulary for text in texts.values()):
        return texts
    return {number: [token if token < vocabulary else 0 for token in text] for number, text in texts.items()}
