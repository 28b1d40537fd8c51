"""What is tried before a model is trusted: a vocabulary on a text of every byte, and a pass on weights of zeros.

llama.cpp ends the process over some files only when it computes, which needs no weights to be found out. Every node is
computed but for multiplications by large weights. Of these as many are as a few milliseconds allow, and the first of
each kind: a kind is an operation and the types of the weights it reads. What is left out gives zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from edge_run.base.protocols import BatchToken
from edge_run.base.units import KIB, MIB
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.graph.nodes import GraphMap, Node
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.model import LlamaModel

SMALL_BYTES = 64 * KIB
MOST_BYTES = 48 * MIB
MOST_OF_A_KIND_BYTES = 256 * MIB
SAMPLED_TOKENS = 256
TEXT = "Once upon a time: 12345 \t\n née Ω 漢字 😀 <|x|></s>" + bytes(range(1, 256)).decode("utf-8", "surrogateescape")

logger = logging.getLogger(__name__)


class Trial:
    """The callback of a context whose passes are first a driver's, then tried. One thread at a time."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._graph: GraphMap = ()
        self._left_out: frozenset[int] = frozenset()
        self._next = 0
        self._is_running = False

    def callback(self, address: int, is_asking: bool, user_data: int) -> bool:
        """Answer llama.cpp's scheduler: the driver does, but while `run` tries the graph. Never raises."""
        if not self._is_running:
            return self._driver.callback(address, is_asking, user_data)
        if not is_asking:
            ggml.clear_data(address)
            return True
        ordinal, self._next = self._next, self._next + 1
        is_known = ordinal < len(self._graph) and self._graph[ordinal].name == ggml.tensor_name(address)
        is_left_out = not is_known or ordinal in self._left_out
        ggml.set_compute_flag(address, not is_left_out and self._graph[ordinal].is_computed)
        return is_left_out

    def run(self, decoder: LocalDecoder, graph: GraphMap, types: Mapping[str, int]) -> None:
        """Compute a pass of one token, whose graph is `graph`, in an empty context that reads zeros as weights.

        types: the type of each weight. A kernel that does not like the model ends the process.
        """
        self._graph, self._left_out, self._next = graph, plan_trial(graph, types), 0
        logger.debug("trial of %d nodes, %d of them left out", len(graph), len(self._left_out))
        self._is_running = True
        try:
            decoder.follow([BatchToken(token=0, position=0, wants_logits=True)])
        finally:
            self._is_running = False


def plan_trial(graph: Iterable[Node], types: Mapping[str, int]) -> frozenset[int]:
    """Return the ordinals of the nodes that are not worth the time; types: the type of each weight."""
    met: set[tuple[object, ...]] = set()
    left_out, total_bytes = set(), 0
    for ordinal, node in enumerate(graph):
        size_bytes = sum(read.row_bytes or read.length for read in node.reads)
        if size_bytes <= SMALL_BYTES:
            continue
        kind = (node.op, *(types.get(read.name) for read in node.reads))
        most_bytes = MOST_BYTES - total_bytes if kind in met else MOST_OF_A_KIND_BYTES
        if size_bytes > most_bytes:
            left_out.add(ordinal)
        else:
            met.add(kind)
            total_bytes += size_bytes
    return frozenset(left_out)


def try_vocabulary(model: LlamaModel) -> None:
    """Take a text of every byte apart, and give the text of tokens: over a broken vocabulary this ends the process."""
    vocab, n_tokens = model.vocab, model.vocabulary
    text = model.can_write(TEXT)
    tokens = {
        *model.tokenize(text, add_special=True, parse_special=True),
        *range(0, n_tokens, max(1, n_tokens // SAMPLED_TOKENS)),
    }
    for token in tokens:
        ggml.token_bytes(vocab, token, False)
        ggml.token_bytes(vocab, token, True)
