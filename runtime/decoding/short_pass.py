"""The graph of a model that is open and has no context yet, from a context that takes little memory."""

from __future__ import annotations

from contextlib import closing

from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import ONE_TOKEN, Driver
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel

SHORT_CONTEXT_TOKENS = 64


def map_short_pass(model: LlamaModel, shape: ContextShape) -> GraphMap:
    """Return the graph of a pass of one token of `model`, whose weights need not be there."""
    short, driver = shape.shortened(SHORT_CONTEXT_TOKENS), Driver()
    with (
        closing(LlamaContext(model, short, driver.callback)) as context,
        closing(LocalDecoder(model, context, driver, short)) as decoder,
    ):
        return decoder.map_graph(ONE_TOKEN)
