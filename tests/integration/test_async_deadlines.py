"""The deadline of an answer of an `AsyncModel`: it ends as it is, in a pass, between passes, or before its turn."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from edge_run import AsyncModel
from kit_models import streamed

PROMPT = "Once upon a time"
pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("sequences", [1, 2])
async def test_a_deadline_ends_an_answer_however_it_is_computed(grown: Path, sequences: int) -> None:
    async with AsyncModel(grown, **{**streamed(), "sequences": sequences}) as model:
        for prompt, deadline_s in ((PROMPT, 0.3), (PROMPT * 40, 0.05), (PROMPT, 1e-9)):
            pieces = [p async for p in model.generate(prompt, temperature=0, ignore_eos=True, deadline_s=deadline_s)]
            assert pieces[-1].generation is not None
            assert pieces[-1].generation.finish_reason == "deadline"
        pieces = [piece async for piece in model.generate(PROMPT, max_tokens=3, deadline_s=600)]
        assert pieces[-1].generation is not None
        assert pieces[-1].generation.finish_reason in ("length", "stop")


async def test_a_deadline_ends_an_answer_that_waits_for_its_turn(kit: Path) -> None:
    """It was told only when the answer before it had ended, which goes on whatever becomes of others."""
    reasons, n_tokens = list[str](), list[int]()
    async with AsyncModel(kit, context_tokens=512, threads=1) as model:

        async def answer(**options: Any) -> None:
            generation = await model.complete(PROMPT, temperature=0, ignore_eos=True, **options)
            reasons.append(generation.finish_reason)
            n_tokens.append(generation.completion_tokens)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(partial(answer, max_tokens=400))
                await anyio.lowlevel.checkpoint()  # it has its turn
                group.start_soon(partial(answer, max_tokens=400, deadline_s=0.05))
    assert reasons == ["deadline", "length"]
    assert n_tokens == [0, 400]
