"""The local decoder: batches of tokens through one llama.cpp context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from edge_run.base.errors import Cancelled, KernelError, NotSupported, option, system_errors, wording
from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.runtime.decoding.batch_limits import Limits
from edge_run.runtime.decoding.driver import ONE_TOKEN, Driver, PassShape
from edge_run.runtime.decoding.padding import LEAST_TOKENS, padded, padded_passes, with_another_output
from edge_run.runtime.decoding.progress import Timeline
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.model import STOPPED, LlamaContext, LlamaModel
from edge_run.runtime.llama.pass_batch import PassBatch
from edge_run.runtime.llama.rollback import Rollback
from edge_run.tiers.kv.cells import CellCount
from edge_run.tiers.kv.row_watcher import RowWatcher


class LocalDecoder:
    """A `Decoder` on this device. Not thread-safe.

    A batch of any length is run in passes of at most `micro_batch_tokens`. Sequences with cells of their own have as
    many tokens in a pass as each other, padding tokens among them, whose logits are not used. Where the shape is exact,
    one that has one token in a pass gets one too, and where one token has logits, another one has: ggml's kernels for
    one column sum in another order than those for several, attention multiplies by the columns of each sequence for
    itself, and the last layer by those of tokens that have logits.

    It is over 200 lines because a batch is rolled back when one of its passes fails: what changes the cache has to know
    what was left in it.

    capabilities: the abilities of this decoder. watcher: is told what happens to the rows in the cells.
    count: how many cells are in use; those that were left count until something comes that takes some.
    keeps_whole_passes: whether those of a batch of one sequence stay where it is cancelled in a later one.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: LlamaContext,
        driver: Driver,
        shape: ContextShape,
        prepare: Callable[[Sequence[BatchToken]], None] = lambda batch: None,
        timeline: Timeline | None = None,
        count: CellCount | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """Decode with `context`.

        prepare: is called with each batch before it runs; confirm: after each pass. What one raises ends the batch.
        timeline: is told of every pass.
        count: counts the cells in use; it may have room for fewer tokens than the context.
        """
        self._model, self._context, self._driver = model, context, driver
        self._prepare, self._confirm, self._timeline = prepare, confirm, timeline or Timeline()
        self.count, self._is_cut = count or CellCount(context.context_tokens), False
        self._width = shape.micro_batch_tokens
        self._batch = PassBatch(self._width, shape.sequences)
        self._rows = context.rows
        self.keeps_whole_passes = False
        self.watcher = RowWatcher()
        has_padding = shape.is_exact and not (model.is_recurrent or shape.pooling)
        self._has_streams, self._has_logits = shape.has_streams, not shape.pooling
        self._least_tokens = LEAST_TOKENS if shape.is_exact else 1  # of a sequence in a pass that several share
        self._sequence_cells = (
            context.context_tokens // shape.sequences if shape.has_streams else context.context_tokens
        )
        rounded_up = shape.context_tokens if shape.pooling else 0
        for most in filter(None, (rounded_up, shape.most_positions)):  # beyond positions llama.cpp ends the process
            self._sequence_cells = min(self._sequence_cells, most)
        self.limits = Limits(
            context_tokens=min(self._sequence_cells, self.count.sequence_tokens) - has_padding,
            vocabulary=model.vocabulary,
            micro_batch_tokens=self._width,
            sequences=shape.sequences,
            outputs_per_pass=shape.outputs_per_pass,
            can_branch=shape.sequences > 1
            and not (shape.has_streams or model.is_recurrent or model.sliding_window_tokens),
            has_padding=has_padding,
            is_short=self.count.most_tokens < context.context_tokens,
            has_window=bool(model.sliding_window_tokens),
        )
        self.capabilities = Capabilities(
            context_tokens=self.limits.context_tokens,
            micro_batch_tokens=self._width,
            sequences=shape.sequences,
            vocabulary=model.vocabulary,
            can_rewind=not model.is_recurrent,
            can_branch=self.limits.can_branch,
            outputs_per_pass=shape.outputs_per_pass,
            rollback_tokens=context.rollback_tokens,
            ring_tokens=context.ring_cells if has_padding and self.limits.has_window else 0,
        )
        self._rollback = Rollback(context.rollback_tokens, self.capabilities.loses_order, has_state=model.is_recurrent)

    @system_errors("computing a pass")
    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        """Run a batch; see `Decoder.decode`. Ctrl-C rolls the batch back, and then raises KeyboardInterrupt."""
        if not self._has_logits:
            raise NotSupported("the model was opened for embeddings, which have no logits; leave out embeddings")
        self.limits.check_batch(batch)
        logits = self._rows.take(sum(token.wants_logits for token in batch))
        self._run(batch, logits)
        return logits

    @system_errors("computing a pass")
    def follow(self, batch: Sequence[BatchToken]) -> None:
        """Run a batch as `decode` does, without memory for logits, which this device does not need."""
        self.limits.check_batch(batch)
        self._run(batch, None)

    def take_back(self, batch: Sequence[BatchToken]) -> None:
        """Remove the tokens that `batch` added; a sequence that cannot be cut is emptied.

        All are where a pass of several failed that had begun to move recurrent state, of other sequences too.
        """
        self.limits.check_batch(batch)
        if self._rollback.is_torn:
            self.clear()
            return
        for sequence in {token.sequence for token in batch}:
            self.rewind(sequence, min(token.position for token in batch if token.sequence == sequence))
        for branch in {branch for token in batch for branch in token.branches}:
            self._empty(branch)
        self._is_cut = True

    def rewind(self, sequence: int, position: int) -> int:
        """Cut `sequence` at `position`; return its new end, which is 0 where it cannot be cut there."""
        self.limits.check_sequences((sequence,))
        self.limits.check_position(position)
        memory = self._context.memory
        self.watcher.cut(sequence, position)
        n_cut = max(0, L.llama_memory_seq_pos_max(memory, sequence) + 1 - position)
        # A sliding-window cache has dropped what the tokens before `position` would look at: such a cut starts anew.
        # Where there is state too, whether that can be cut decides: it can by tokens of the last pass, if at all.
        window = self._model.sliding_window_tokens if n_cut and not self._model.is_recurrent else 0
        is_lost = window and position and L.llama_memory_seq_pos_min(memory, sequence) > max(0, position - window)
        can_go_on = self._rollback.cut(sequence, position, n_cut)
        if is_lost or not can_go_on or not L.llama_memory_seq_rm(memory, sequence, position, -1):
            self._empty(sequence)
            position = 0
        self._is_cut = True
        return min(position, L.llama_memory_seq_pos_max(memory, sequence) + 1)

    @property
    def why_no_shift(self) -> str:
        """Why `shift` cannot work; empty where it can."""
        if self._model.is_recurrent or not L.llama_memory_can_shift(self._context.memory):
            return "llama.cpp cannot shift this model's keys and values"
        if self.limits.is_short:  # keys of all cells are turned, those that have no room too
            shorter, more = option("context_tokens"), option("memory")
            return f"the budget has no room for the whole context; give a shorter one ({shorter}), or more {more}"
        return ""

    def shift(self, position: int, n_tokens: int) -> None:
        """Take `n_tokens` tokens from `position` on out of sequence 0; those after them move down by as many.

        llama.cpp turns their keys before it computes the next pass. If that pass fails, the context is void.
        """
        self.watcher.branched(position)
        L.llama_memory_seq_rm(self._context.memory, 0, position, position + n_tokens)
        L.llama_memory_seq_add(self._context.memory, 0, position + n_tokens, -1, -n_tokens)
        self.count.shift(n_tokens)
        self._is_cut = True
        self._driver.expects_shift = True

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        """Make each of `branches` share the tokens of `sequence`, and hold no others; nothing is copied."""
        self.limits.check_branches(sequence, branches)
        self._count_cut()
        for branch in branches:
            self._empty(branch)
            L.llama_memory_seq_cp(self._context.memory, sequence, branch, -1, -1)

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        """Let `sequence` continue as `branch` does from `position` on, and empty all `branches`."""
        self.limits.check_keep(sequence, branch, branches)
        self.limits.check_position(position)
        memory = self._context.memory
        if branch != sequence:
            self.watcher.branched(position)
            L.llama_memory_seq_rm(memory, sequence, position, -1)
            L.llama_memory_seq_cp(memory, branch, sequence, position, -1)
        for other in branches:
            self._empty(other)
        self._is_cut = True

    @system_errors("computing a pass")
    def place(self, tokens: Sequence[int], position: int, look: Callable[[int], None]) -> None:
        """Put `tokens`, of one pass, into the cells of sequence 0 from `position` on, and compute nothing.

        The rows of these cells must be filled before anything looks at them. look: is called with each node of the
        graph that is skipped. Raises what `decode` raises.
        """
        batch = [BatchToken(token, position + i) for i, token in enumerate(tokens)]
        self.limits.check_batch(batch)
        self._fill(batch)
        with self._driver.interrupt.hearing_signals(), self._driver.placing(PassShape(len(batch), 0), look):
            code = self._context.decode(self._batch)
        self._check_code(code, len(batch))
        self.watcher.ran(batch)

    @system_errors("computing a pass")
    def tail_rows(self, n_rows: int) -> Logits:
        """Return the logits of a pass of `n_rows` tokens that leaves nothing in the context.

        For programs of layers that look at no cells, and have their input from elsewhere. There must be as many free
        cells. Raises what `decode` raises.
        """
        start = self._lengths()[0]
        tokens = [BatchToken(0, start + i, wants_logits=True) for i in range(n_rows)]
        logits = self._rows.take(n_rows)
        try:
            with self._driver.interrupt.hearing_signals():
                self._plain_pass(tokens, logits, 0)
        except Cancelled:
            self._driver.interrupt.reset()
            raise
        finally:
            self.watcher.cut(0, start)
            L.llama_memory_seq_rm(self._context.memory, 0, start, -1)
            self._is_cut = True
        return logits

    @system_errors("reading the graph")
    def map_graph(self, shape: PassShape = ONE_TOKEN, *, notes_nodes: bool = True) -> GraphMap:
        """Map a pass of `shape` in the empty context; return its graph with `notes_nodes`, else note its flow only."""
        self.limits.check_shape(shape)
        first = shape.tokens - shape.outputs
        self._fill([BatchToken(token=0, position=i, wants_logits=i >= first) for i in range(shape.tokens)])
        with self._driver.interrupt.hearing_signals(), self._driver.mapping(notes_nodes=notes_nodes):
            code = self._context.decode(self._batch)
        L.llama_memory_clear(self._context.memory, False)  # nothing was computed, so nothing was written
        graph = self._driver.take_map()
        if code != 0 or (notes_nodes and not any(node.reads for node in graph)):
            other = option("backend", "llama.cpp")
            raise KernelError(f"llama.cpp showed no weights in its graph (code {code}); {other} may work")
        return graph

    def clear(self) -> None:
        """Empty all sequences."""
        self.watcher.cut(0, 0)
        L.llama_memory_clear(self._context.memory, False)
        self._rollback.clear()
        self.watcher.cleared()
        self._is_cut = True

    def close(self) -> None:
        """Free the batch. Idempotent."""
        self._batch.close()

    def _empty(self, sequence: int) -> None:
        self.watcher.cut(sequence, 0)
        self._rollback.empty(sequence)
        L.llama_memory_seq_rm(self._context.memory, sequence, -1, -1)

    def recount(self, lengths: Sequence[int], n_cells: int) -> None:
        """If sequences have these lengths, they take `n_cells` cells: what several share counts once."""
        self._count_cut()
        if list(lengths) == self._lengths():
            self.count.lower(n_cells)

    def _count_cut(self) -> None:
        """Count the cells again that are in use, once for all that was cut since: before others are taken."""
        if self._is_cut:
            self.count.note(self._lengths())
            self._is_cut = False

    def _lengths(self) -> list[int]:
        return [L.llama_memory_seq_pos_max(self._context.memory, one) + 1 for one in range(self.limits.sequences)]

    def _note_forks(self, batch: Sequence[BatchToken]) -> None:
        """Have tokens counted that come beside those of other sequences. Raises ContextFull where all have no room."""
        self._count_cut()
        if self.limits.sequences == 1:
            return
        sequences = {sequence for token in batch for sequence in (token.sequence, *token.branches)}
        sequences.update(sequence for sequence, length in enumerate(self._lengths()) if length)
        if len(sequences) > 1:
            self.watcher.branched(min(token.position for token in batch))
            self.count.fork(min(token.position for token in batch))
        if self.limits.is_short and not self.count.has_room(len(batch)):
            self.limits.refuse_more()

    def _run(self, batch: Sequence[BatchToken], logits: Logits | None) -> None:
        """Run a checked batch, and write the logits that it asks for to `logits`."""
        try:
            with self._driver.interrupt.hearing_signals():
                self._prepare(batch)
                self._note_forks(batch)
            self._run_passes(batch, logits)
        except Cancelled:
            self._driver.interrupt.reset()  # it was for this batch
            raise
        finally:
            self._timeline.end()

    def _run_passes(self, batch: Sequence[BatchToken], logits: Logits | None) -> None:
        n_done = filled = 0
        try:
            with self._driver.interrupt.hearing_signals():
                for tokens in self._passes_of(batch):
                    self._driver.interrupt.check()
                    filled = self._pass(tokens, logits, filled)
                    n_done += len(tokens)
                    self._timeline.advance()
        except BaseException as error:
            lost = batch[self._n_kept(batch, n_done, error) :]
            self.watcher.taken_back(len(lost) + self.limits.has_padding)
            self.take_back(lost)
            raise

    def _n_kept(self, batch: Sequence[BatchToken], n_done: int, error: BaseException) -> int:
        """Return how many tokens of a batch stay where it ends with `error`; whole passes have computed `n_done`."""
        is_cancelled = self.keeps_whole_passes and isinstance(error, Cancelled)
        is_one_text = not any(token.branches or token.sequence != batch[0].sequence for token in batch)
        return n_done if is_cancelled and is_one_text else 0

    def _passes_of(self, batch: Sequence[BatchToken]) -> Iterator[Sequence[BatchToken]]:
        """Return the tokens of each pass that runs a part of `batch`."""
        if self._has_streams and batch[0].sequence != batch[-1].sequence:
            yield from padded_passes(batch, min(self._width, self.limits.outputs_per_pass), self._least_tokens)
        else:
            for start in range(0, len(batch), self._width):
                yield batch[start : start + self._width]

    def _pass(self, tokens: Sequence[BatchToken], logits: Logits | None, filled: int) -> int:
        is_padded = self._has_streams and tokens[0].sequence != tokens[-1].sequence
        is_padded |= self.limits.has_padding and len(tokens) == 1
        if is_padded:
            return self._padded_pass(tokens, logits, filled)
        kept = [i for i, token in enumerate(tokens) if token.wants_logits]
        if self.limits.has_padding and len(kept) == 1:
            tokens = with_another_output(tokens)
        return self._plain_pass(tokens, logits, filled, kept)

    def _plain_pass(
        self, tokens: Sequence[BatchToken], logits: Logits | None, filled: int, kept: Sequence[int] | None = None
    ) -> int:
        """Compute a pass; write the logits that it gives from row `filled` on; return the row after them.

        For who hears signals. kept: the numbers of the tokens whose logits are written; None: of all that have some.
        """
        self._fill(tokens)
        outputs = [i for i, token in enumerate(tokens) if token.wants_logits]
        with self._driver.running(PassShape(len(tokens), len(outputs))):
            self._rollback.begin(tokens)
            code = self._context.decode(self._batch)
            if code == STOPPED:
                raise Cancelled("the pass was cancelled")
        self._check_code(code, len(tokens))
        self._confirm()  # before anybody keeps what it has computed
        self._rollback.ran(tokens)
        self.watcher.ran(tokens)
        if logits is None:
            return filled
        for i in outputs if kept is None else kept:
            row = L.llama_get_logits_ith(self._context.handle, i)
            logits[filled] = ggml.float_rows(row, self._model.vocabulary)
            filled += 1
        return filled

    def _check_code(self, code: int, n_tokens: int) -> None:
        if code == 1:
            self._rollback.refused()
            self.limits.refuse_more(self._context.context_tokens)
        if code != 0:
            raise KernelError(
                f"llama.cpp failed to decode {n_tokens} tokens (code {code}); {wording('-v', 'its log')} shows what it "
                "says, and `edge-run doctor` looks at the installation"
            )

    def _padded_pass(self, tokens: Sequence[BatchToken], logits: Logits | None, filled: int) -> int:
        """Compute a pass with padding tokens; see `_plain_pass`."""
        line, cuts = padded(tokens, self._lengths(), self._least_tokens)
        if max(token.position for token in line) >= self._sequence_cells:
            self.limits.refuse_more()
        wanted = {(token.sequence, token.position) for token in tokens if token.wants_logits}
        kept = [i for i, token in enumerate(line) if (token.sequence, token.position) in wanted]
        try:
            return self._plain_pass([replace(one, wants_logits=bool(wanted)) for one in line], logits, filled, kept)
        finally:
            for sequence, position in cuts.items():
                self.watcher.cut(sequence, position)
                L.llama_memory_seq_rm(self._context.memory, sequence, position, -1)
            self._is_cut = True

    def _fill(self, tokens: Sequence[BatchToken]) -> None:
        """Write the checked tokens of one pass, which is next, into llama.cpp's arrays."""
        self._count_cut()
        self.count.expect(token.sequence for token in tokens)
        self._batch.fill(tokens)
