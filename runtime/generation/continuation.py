"""What a model adds to a prompt: tokens chosen one by one, turned into text, until the answer ends."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

from edge_run.base.closing import Closing
from edge_run.base.protocols import Logits
from edge_run.base.results import Piece, TokenLogprobs
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.output import Delta, Meaning, OutputParser, meaning
from edge_run.runtime.generation.sampling import CandidateTable, OpenGrammar, Sampler
from edge_run.runtime.generation.text import TextStream
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.model import LlamaModel

logger = logging.getLogger(__name__)


class Continuation(Closing):
    """An answer in the making, whoever computes it. Not thread-safe. Close it when it has ended.

    prompt: the tokens that it continues.
    tokens: the tokens of the answer so far.
    logprobs: how likely each was, where that was asked for.
    dropped_messages: of the conversation that it answers, those that were left out.
    marks: control tokens whose text is a part of the answer's.
    on_read: as of `Request`.
    parser: tells apart what the answer says, thinks and calls; None where it answers no conversation.
    """

    def __init__(
        self,
        model: LlamaModel,
        prompt: Sequence[int],
        max_tokens: int | None,
        sampling: SamplingConfig,
        context_tokens: int,
        open_grammar: OpenGrammar = lambda config: None,
        table: CandidateTable | None = None,
    ) -> None:
        """Prepare to continue `prompt`.

        max_tokens: None is as many as the context has room for. open_grammar, table: as of `Sampler`, whose errors it
        raises.
        """
        self.prompt = prompt
        self.dropped_messages = 0
        self._vocab = model.vocab
        self._max_tokens = context_tokens if max_tokens is None else max_tokens
        self._sampler = Sampler(
            model.vocab,
            sampling,
            model.vocabulary,
            context_tokens,
            open_grammar,
            table,
            text_tokens=len(prompt) + self._max_tokens,
        )
        weakref.finalize(self, self._sampler.close).atexit = False  # where nobody goes on with it
        self._text = TextStream(sampling.stop)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.marks: frozenset[int] = frozenset()
        self.on_read: Callable[[int], object] | None = None
        self.parser: OutputParser | None = None
        self._n_read = -1  # tokens of the prompt; before any was looked for
        self._written: list[str] = []
        self._deltas: list[Delta] = []

    @property
    def seed(self) -> int:
        """The seed that tokens are drawn with."""
        return self._sampler.seed

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._written)

    @property
    def meaning(self) -> Meaning:
        """What the text means so far, as far as that is certain; nothing without a parser."""
        return meaning(self._deltas) if self.parser else Meaning()

    @property
    def wants_none(self) -> bool:
        """Whether no token was asked for."""
        return not self._max_tokens

    @property
    def n_left(self) -> int:
        """The tokens that may follow at most."""
        return self._max_tokens - len(self.tokens)

    def begin(self) -> None:
        """Have penalties count the prompt."""
        self._sampler.prime(self.prompt)

    def note_read(self, n_tokens: int) -> None:
        """The first `n_tokens` tokens of the text are computed: tell who wants to know how far the prompt is."""
        n_read = min(n_tokens, len(self.prompt))
        if n_read <= self._n_read:  # of an answer that goes on, or of one that gave way and is computed again
            return
        self._n_read = n_read
        if self.on_read is not None:
            try:
                self.on_read(n_read)
            except Exception:  # the pass has answers of others, which must not end by that
                logger.exception("who was to be told how far the prompt is failed, and is told no more")
                self.on_read = None

    def choose(self, logits: Logits) -> Piece | None:
        """Return the next token and its text; None where the model ends the answer. Errors as of `Sampler.choose`."""
        token = self._sampler.choose(logits)
        self._sampler.accept(token)
        if L.llama_vocab_is_eog(self._vocab, token):
            return None
        self.tokens.append(token)
        logprobs = self._sampler.logprobs(logits, token)
        if logprobs:
            self.logprobs.append(logprobs)
        text = self._text.push(ggml.token_bytes(self._vocab, token, token in self.marks))
        return self._piece(text, (token,), logprobs)

    def why_stop(self) -> str:
        """Return why the answer ends after its last token: `stop`, `length`, or nothing."""
        if self._text.is_stopped:
            return "stop"
        return "length" if len(self.tokens) >= self._max_tokens else ""

    def finish(self) -> Piece:
        """Return what was held back; no token may follow."""
        return self._piece(self._text.finish(), is_last=True)

    def _piece(
        self, text: str, tokens: tuple[int, ...] = (), logprobs: TokenLogprobs | None = None, is_last: bool = False
    ) -> Piece:
        self._written.append(text)
        if self.parser is None:
            return Piece(text, tokens, None, logprobs)
        deltas = [*self.parser.push(text), *(self.parser.finish() if is_last else ())]
        self._deltas += deltas
        content, reasoning, _ = meaning(deltas)
        return Piece(text, tokens, None, logprobs, content, reasoning)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended it."""
        return self._text.is_stopped

    @property
    def stop_text(self) -> str:
        """The stop string that ended it; empty where none did."""
        return self._text.stop_text

    def close(self) -> None:
        """Free the sampler. Idempotent."""
        self._sampler.close()
