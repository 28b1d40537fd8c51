"""Traces of mixtures of experts: a prompt, what the model makes of it, and which experts each token was routed to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from edge_run.base.config import ModelConfig, ModelOptions
from edge_run.base.errors import ConfigError, NotSupported, option, system_errors
from edge_run.base.files.whole import whole_file, writing
from edge_run.base.options import Unpack, config_of
from edge_run.base.replay import Recording
from edge_run.devices.host.target_file import check_target
from edge_run.prefetch.routes import DECODE, Route, RouteHeader, RouteWriter
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.prompt_text import tokenize_prompt
from edge_run.runtime.streaming.route_recorder import RouteRecorder, route_header
from edge_run.tiers.gguf import read_gguf


@system_errors("tracing")
def trace(
    path: str | Path,
    prompt: str,
    output: str | Path,
    *,
    max_tokens: int = 128,
    config: ModelConfig | None = None,
    is_overwritten: bool = False,
    on_token: Callable[[int], None] = lambda n_tokens: None,
    opening: AbstractContextManager[object] | None = None,
    **options: Unpack[ModelOptions],
) -> Recording:
    """Let the model at `path` continue `prompt` by its likeliest tokens; write what its routers choose to `output`.

    max_tokens: at most so many, up to where the model ends or the context is full. is_overwritten: an `output` that
    exists is replaced. on_token: hears of every token. opening: a context to open the model in. options: the fields of
    `ModelConfig`, as for `Model`. Raises like `Model`; NotSupported for a model without experts, ConfigError for
    `exact`, and for an output that exists, is the model itself or has no folder, TierReadError where it cannot be
    written. Nothing is left of a trace that was not finished.
    """
    config = config_of(ModelConfig, config, options)
    if config.exact:
        raise ConfigError(
            f"exact: its passes have padding tokens, which would be in the trace; leave out {option('exact')}"
        )
    gguf = read_gguf(Path(path))
    output = check_target(Path(output), [shard.path for shard in gguf.shards], "the model itself", is_overwritten)
    header = route_header(gguf)
    if not header.expert_bytes:
        raise NotSupported(f"{path}: no mixture of experts, so nothing is routed; give another GGUF file")
    settings = replace(config, gpu_memory=0)  # its routers are not seen
    with (
        writing(str(output)),
        whole_file(output, is_replacing=is_overwritten) as draft,
        draft.open("w", encoding="utf-8") as file,
    ):
        recorder = RouteRecorder(header, _NamedWriter(file, header, str(output)))
        with system_errors("tracing"):  # what is refused to the model is no fault of the output's place
            with opening or nullcontext():
                engine = Engine.open(Path(path), settings, recorder=recorder, gguf=gguf)
            with closing(engine):
                _generate(engine, prompt, max_tokens, recorder, on_token)
    layers = len(header.expert_bytes)
    return Recording(str(output), layers, header.n_experts, *recorder.n_tokens.values())


class _NamedWriter(RouteWriter):
    """Writes as `RouteWriter` does, and errors have the name of the output: they come amid those of the model."""

    def __init__(self, file: TextIO, header: RouteHeader, name: str) -> None:
        super().__init__(file, header)
        self._name = name

    def write(self, routes: Sequence[Route]) -> None:
        """Write a row for each of `routes`. Raises TierReadError where the file refuses."""
        with writing(self._name):
            super().write(routes)


def _generate(
    engine: Engine, prompt: str, max_tokens: int, recorder: RouteRecorder, on_token: Callable[[int], None]
) -> None:
    tokens = tokenize_prompt(engine.model, prompt, engine.front.capabilities.context_tokens)
    if not tokens:
        raise ConfigError("prompt: is empty; give at least one token")
    session = Session(engine.front)
    logits, _ = session.feed(tokens)
    recorder.phase = DECODE
    for number in range(max_tokens):
        token = int(logits.argmax())
        if L.llama_vocab_is_eog(engine.model.vocab, token) or session.is_full:
            break
        logits = session.step(token)
        on_token(number + 1)
