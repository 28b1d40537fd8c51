"""Keys and values in a file of which an attention looks at some: by the model's own choice, or by `--kv-keep`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.streaming.visible_rows import VisibleRows
from in_child import in_child
from spilling import open_spilling, spilled_of
from talks import OPTIONS, WIDTH, Talk, check_rows
from tiny_models import ARCHITECTURES, make_model


@pytest.mark.parametrize("name", ["deepseek32", "glm-dsa"])
@in_child
def test_of_rows_that_a_model_chooses_among_those_come_that_it_chose(name: str, folder: Path) -> None:
    recipe = ARCHITECTURES[name]
    few = f"{name}-few"  # each its own: a model that was made before is found by its name
    ARCHITECTURES[few] = replace(recipe, metadata={**recipe.metadata, "attention.indexer.top_k": 8})
    path, said, read = make_model(few, folder), list[Talk](), list[int]()

    def say(talk: Talk) -> None:
        talk.prompt(14 * WIDTH)
        talk.step(6)
        talk.verify(5, 2)
        talk.rewind(600)
        talk.step(2)

    for chooses in (True, False):
        engine = open_spilling(path, folder)
        spilled, totals = spilled_of(engine), list[int]()
        spilled.spill.room_bytes = 0
        assert isinstance(spilled.chooser, VisibleRows)
        if not chooses:
            spilled.chooser.choose = lambda _: None  # type: ignore[method-assign]
        said.append(Talk(engine.decoder, lambda of=spilled, to=totals: to.append(of.figures.read_bytes)))  # type: ignore[misc]
        say(said[-1])
        read.append(totals[19] - totals[13])
        engine.close()
    for talk in said:
        check_rows(path, say, OPTIONS, talk)
    assert read[0] < 0.8 * read[1], "of the six tokens after the prompt"


@pytest.mark.parametrize(("kind", "name"), [("pages", "llama"), ("blocks", "qwen3moe"), ("window", "deepseek2")])
@in_child
def test_only_what_is_looked_at_is_read(kind: str, name: str, folder: Path) -> None:
    """With `--kv-keep`, logits are those of the same choice in memory; what is not read is unreadable."""
    path, options = make_model(name, folder), {"kv_keep": 320, "kv_keep_by": kind}

    def say(talk: Talk) -> None:
        talk.prompt(700)
        talk.step(40)
        talk.rewind(333)
        talk.prompt(320)
        talk.step(20)

    read: dict[bool, int] = {}
    for is_kept in (True, False):
        engine = open_spilling(path, folder, **(options if is_kept else {}))
        spill = spilled_of(engine).spill
        spill.room_bytes = 0
        found = Talk(engine.decoder, spill.texts[0].check)
        found.prompt(700)
        before = spill.file.read_bytes
        found.step(40)
        read[is_kept] = spill.file.read_bytes - before
        if is_kept:
            found.rewind(333)
            found.prompt(320)
            found.step(20)
            kept = found
        engine.close()
    # Pages of 16 tokens are everywhere: most pieces have one. And what is read ahead may turn out not to be looked at.
    assert read[True] < {"pages": 1.1, "blocks": 0.9, "window": 0.7}[kind] * read[False]
    engine = Engine.open(path, ModelConfig(**{**OPTIONS, **options}))
    wanted = Talk(engine.decoder)
    say(wanted)
    engine.close()
    assert all(np.array_equal(a, b) for a, b in zip(wanted.rows, kept.rows, strict=True))
