"""Choosing the next token: llama.cpp's own samplers, in llama.cpp's default order.

    model's suppressed tokens -> biases -> penalties -> top-k -> top-p -> min-p -> temperature -> draw

DRY, top-n-sigma, typical and XTC are off in llama.cpp's defaults and have no setting here. Equal logits, settings and
seed give the token that llama.cpp's tools choose, with one exception: at temperature 0 the other filters cannot
change the best token and are left out, so that of equally good tokens it is always the lowest.

A grammar is applied as llama.cpp does it (common/sampling.cpp, `common_sampler_sample`): choose freely first, which is
nearly always right and costs nothing; only where the grammar refuses that token, ask it about the whole vocabulary and
choose again. Not covered: lazy grammars, reasoning budgets.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_run.base.closing import Closing
from edge_run.base.config import MOST_CONTEXT_TOKENS
from edge_run.base.errors import ConfigError, KernelError, LogitsError, NotSupported
from edge_run.base.protocols import Logits
from edge_run.base.results import TokenLogprobs
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.grammars.grammar import CANDIDATE, LocalGrammar, grammar_text
from edge_run.runtime.grammars.room import RoomedGrammar
from edge_run.runtime.llama import _ggml as ggml

OpenGrammar: TypeAlias = Callable[[SamplingConfig], LocalGrammar | RoomedGrammar | None]

_ANY_SEED = 2**32 - 1  # llama.cpp's word for "draw one": never passed, so that the seed can be reported
_MIN_KEEP = 0
_MOST_LOOKED_BACK = 2**18  # llama.cpp takes memory for as many tokens as it is told to look back, needed or not


class CandidateTable:
    """The table in which llama.cpp's samplers look at all tokens. One choice at a time; several samplers may share it.

    n_vocab: the tokens of the vocabulary.
    """

    def __init__(self, vocab: Any, n_vocab: int) -> None:
        """vocab: llama.cpp's vocabulary."""
        self.n_vocab, self._vocab = n_vocab, vocab
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._table = np.zeros(n_vocab, CANDIDATE)
        self._suppressed = np.array(ggml.suppressed_tokens(vocab), dtype=np.int64)

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens by which the model ends an answer."""
        return tuple(token for token in range(self.n_vocab) if ggml.L.llama_vocab_is_eog(self._vocab, token))

    def is_suppressed(self, token: int) -> bool:
        """Return whether the model never says `token`."""
        return token in self._suppressed

    def fill(self, logits: Logits, biased: NDArray[np.int64], bias: NDArray[np.float32]) -> NDArray[Any]:
        """Return the table with `logits`, `(n_vocab,)`, of the tokens that the model does not suppress.

        biased: tokens to whose logits `bias` is added.
        """
        table = self._table
        table["id"], table["logit"] = self._ids, logits  # both: the samplers reorder the table
        table["logit"][self._suppressed] = -np.inf
        table["logit"][biased] += bias
        return table


class Sampler(Closing):
    """Chooses tokens of one answer. Close it, or use it in a `with`.

    vocab: llama.cpp's vocabulary, which must outlive the sampler. n_vocab: tokens in it.
    context_tokens: what `repeat_last_n = -1` stands for; needed only then.
    open_grammar: returns the grammar of `config`, which is closed with the sampler; None where it has none.
    table: shared with other samplers of the vocabulary; None makes one.
    text_tokens: as long as prompt and answer get at most.
    seed: the seed in use, drawn when the configuration has none.

    Raises ConfigError, and what `open_grammar` raises. Not thread-safe: one answer at a time.
    """

    def __init__(
        self,
        vocab: Any,
        config: SamplingConfig,
        n_vocab: int,
        context_tokens: int | None = None,
        open_grammar: OpenGrammar = lambda config: None,
        table: CandidateTable | None = None,
        text_tokens: int = MOST_CONTEXT_TOKENS,
    ) -> None:
        self.seed = secrets.randbelow(_ANY_SEED) if config.seed is None else config.seed
        self._last_n_tokens = min(_last_n_tokens(config, context_tokens), text_tokens)
        self._table = table or CandidateTable(vocab, n_vocab)
        self._n_top = config.top_logprobs
        if outside := [token for token in config.logit_bias if not 0 <= token < n_vocab]:
            raise ConfigError(f"logit bias: token {outside[0]} is outside the vocabulary of {n_vocab}")
        banned = dict.fromkeys(self._table.end_tokens, -math.inf) if config.ignore_eos else {}
        biases = {**config.logit_bias, **banned}
        self._biased, self._bias = np.array([*biases], np.int64), np.array([*biases.values()], np.float32)
        self._grammar = open_grammar(config)  # after all that is refused here: nobody else would close it
        assert self._grammar or not grammar_text(config)[0], "an answer follows its grammar"
        self._takes_best = config.temperature == 0 and not (self._last_n_tokens or biases or self._grammar)
        self._config, self._is_closed = config, False
        self._opened_chain: Any = None  # before it is used: answers that wait take no memory for it

    @property
    def _chain(self) -> Any:
        """llama.cpp's samplers."""
        if self._opened_chain is None:
            self._opened_chain = _open_chain(self._config, self._table.n_vocab, self._last_n_tokens, self.seed)
        return self._opened_chain

    def choose(self, logits: Logits) -> int:
        """Return the next token for `logits`, `(n_vocab,)` float32, which stay as they are.

        Draws from the seed's sequence, so it is not repeatable; tell the sampler the outcome with `accept`.
        Raises LogitsError for logits that are not numbers, NotSupported where no token continues the grammar.
        """
        self._check_open()
        n_vocab = self._table.n_vocab
        if logits.shape != (n_vocab,):
            raise KernelError(f"sampling: logits of shape {logits.shape}, the vocabulary has {n_vocab} tokens")
        first = int(logits.argmax())
        if not np.isfinite(best := logits[first]):
            raise LogitsError(
                f"sampling: the best logit is {best}; the weights or the computation are damaged; copy or download the "
                "model again"
            )
        if self._takes_best and not self._table.is_suppressed(first):
            return first
        token = self._choose(logits, is_grammar_first=False)
        if self._grammar is None or self._grammar.fits(token):
            return token
        return self._choose(logits, is_grammar_first=True)

    def logprobs(self, logits: Logits, token: int) -> TokenLogprobs | None:
        """Return how likely `token` was by `logits`, and the likeliest ones; None where that was not asked for."""
        if self._n_top is None:
            return None
        shifted = logits.astype(np.float64) - float(logits.max())
        shifted -= np.log(np.exp(shifted).sum())
        best = np.argpartition(-shifted, min(self._n_top, len(shifted) - 1))[: self._n_top]
        ranked = sorted(((int(one), float(shifted[one])) for one in best), key=lambda pair: (-pair[1], pair[0]))
        return ((token, float(shifted[token])), *ranked)

    def accept(self, token: int) -> None:
        """Note that `token` is the next token of the answer, whether chosen here or elsewhere.

        Raises ConfigError, and changes nothing, where the token is not of the vocabulary or breaks the grammar
        (which llama.cpp answers by aborting the process).
        """
        self._check_open()
        if not 0 <= token < self._table.n_vocab:
            raise ConfigError(f"sampling: token {token}: must be 0 to {self._table.n_vocab - 1}")
        if self._grammar is not None:
            if not self._grammar.fits(token):
                raise ConfigError(f"sampling: token {token} cannot come next in the grammar")
            self._grammar.accept(token)
        if not self._takes_best:  # else the samplers have nothing to remember
            ggml.L.llama_sampler_accept(self._chain, token)

    def prime(self, tokens: Sequence[int]) -> None:
        """Note the tokens of the prompt: penalties count them, the grammar begins after them."""
        self._check_open()
        for token in tokens[max(0, len(tokens) - self._last_n_tokens) :]:
            ggml.L.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free llama.cpp's samplers. Closing twice does nothing more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._opened_chain is not None:
            ggml.L.llama_sampler_free(self._opened_chain)
        if self._grammar is not None:
            self._grammar.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this answer was closed; begin another one")

    def _choose(self, logits: Logits, is_grammar_first: bool) -> int:
        table = self._table.fill(logits, self._biased, self._bias)
        candidates = ggml.candidates(table)
        if is_grammar_first and self._grammar is not None:
            table["logit"][self._grammar.refused()] = -np.inf
            if table["logit"].max() == -np.inf:
                raise NotSupported("grammar: no token of this model can continue the answer; loosen the grammar")
        ggml.L.llama_sampler_apply(self._chain, candidates)
        return int(candidates.data[candidates.selected].id)


def _last_n_tokens(config: SamplingConfig, context_tokens: int | None) -> int:
    """Return how many tokens back the penalties look; 0 where they are off.

    Never further than the context, or than texts are long that outgrow theirs.
    """
    if config.repeat_penalty == 1.0 and not (config.frequency_penalty or config.presence_penalty):
        return 0
    if not math.isfinite(config.repeat_penalty):
        raise ConfigError(f"repeat penalty {config.repeat_penalty}: must be finite")
    if config.repeat_last_n >= 0:
        return min(config.repeat_last_n, max(context_tokens or 0, _MOST_LOOKED_BACK))
    if context_tokens is None:
        raise ConfigError("repeat last n -1 (the context): the context's length is not known here; give a number")
    return context_tokens


def _open_chain(config: SamplingConfig, n_vocab: int, last_n_tokens: int, seed: int) -> Any:
    """Return llama.cpp's sampler chain, which owns the samplers in it."""
    low = ggml.L
    penalties = config.repeat_penalty, config.frequency_penalty, config.presence_penalty
    steps = [low.llama_sampler_init_penalties(n_vocab, last_n_tokens, *penalties)]
    if config.temperature == 0:
        steps.append(low.llama_sampler_init_greedy())
    else:
        steps += [
            low.llama_sampler_init_top_k(min(config.top_k, n_vocab)),
            low.llama_sampler_init_top_p(config.top_p, _MIN_KEEP),
            low.llama_sampler_init_min_p(config.min_p, _MIN_KEEP),
            low.llama_sampler_init_temp(config.temperature),
            low.llama_sampler_init_dist(seed),
        ]
    chain = low.llama_sampler_chain_init(low.llama_sampler_chain_default_params())
    for step in steps:
        low.llama_sampler_chain_add(chain, step)
    return chain
