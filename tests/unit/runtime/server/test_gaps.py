"""Gaps in code: the prompts that fill them, as llama-server makes them, whatever there is around them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import ContextFull
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.llama.prompt_text import GapMarks
from edge_run.runtime.server.apis import gaps
from edge_run.runtime.server.apis.gaps import Gap, OtherPiece, gap_tokens, infill_tokens
from edge_run.runtime.server.apis.llama_server import InfillRequest, NativeCompletionForm, native_job
from edge_run.runtime.server.apis.ollama import OllamaGenerateRequest, generate_job
from edge_run.runtime.server.apis.openai_completions import CompletionRequest, completion_job
from edge_run.runtime.server.bodies import convert
from edge_run.runtime.server.catalogue.served_model import AnswerDefaults, Preparing, ServedModel
from edge_run.runtime.server.counts import Counts
from edge_run.runtime.server.refusals import Refusal

MARKS = "^$_#/<"  # before, behind, gap, project, file, and what each text begins with
FULL = GapMarks(*map(ord, MARKS[:5]), begins=(ord("<"),))
SPARE = GapMarks(*map(ord, MARKS[:3]), -1, -1, ())


class Letters:
    """A model of which each letter is a token."""

    has_chat_template = keeps_prompts = False
    token_bytes = None

    def __init__(self, marks: GapMarks | None = FULL, context_tokens: int = 4096) -> None:
        self.gap_marks, self.context_tokens, self.n_letters = marks, context_tokens, 0

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool = False) -> list[int]:
        assert not add_special
        self.n_letters += len(text)
        return [*map(ord, text)]


def served(model: Any) -> ServedModel:
    return ServedModel("x", model, None, AnswerDefaults(), Preparing(), Counts())  # type: ignore[arg-type]


def prompt(model: Any, gap: Gap, most_tokens: int | None = None) -> str:
    return "".join(map(chr, infill_tokens(model, gap, most_tokens)))


def test_a_prompt_has_the_parts_of_llama_servers_in_their_order() -> None:
    gap = Gap("a = ", "\nc", "b", [OtherPiece("one", "1.py"), OtherPiece("two")])
    assert prompt(Letters(), gap) == "#myproject\n/1.py\none/tmp\ntwo/filename\n<^a = b$\nc_"
    snippet = "\n\n--- snippet ---\n\n"
    assert prompt(Letters(SPARE), gap) == f"{snippet}one{snippet}two^a = b$\nc_"
    assert prompt(Letters(), Gap("", "")) == "#myproject\n/filename\n<^$_"


def test_of_what_is_around_a_gap_the_nearest_is_taken_and_of_other_pieces_what_has_room() -> None:
    model, gap = Letters(), Gap("p" * 5000, "s" * 5000, "l" * 100, [OtherPiece("o" * 90_000), OtherPiece("n" * 500)])
    text = prompt(model, gap, 96)
    assert [text.count(letter) for letter in "pls"] == [1536 + 1, 100 + 1, 512 - 2 - 100]  # with those of names
    assert len(text) == model.context_tokens - 96 - 2
    other = prompt(Letters(), Gap("p" * 5000, "s" * 5000, "l" * 90, gap.pieces), 96)
    assert other.startswith(text[: text.index("<")]), "what is typed leaves the beginning as it was"
    assert text.index("n" * 500) > text.index("o" * 100)
    assert model.n_letters < 100_000, "of a long text only what may be taken is turned into tokens"


@pytest.mark.parametrize("context_tokens", [1, 8, 64, 2048])
@pytest.mark.parametrize("most_tokens", [None, 0, 1, 10_000])
def test_where_the_context_is_small_a_prompt_leaves_room_for_an_answer(
    context_tokens: int, most_tokens: int | None
) -> None:
    gap = Gap("p" * 9999, "s" * 9999, "l" * 9999, [OtherPiece("o" * 9999)])
    assert len(prompt(Letters(context_tokens=context_tokens), gap, most_tokens)) < max(context_tokens, len("<^$_") + 1)


@pytest.mark.anyio
async def test_editors_and_completions_with_a_suffix_get_prompts_around_the_gap() -> None:
    model = served(Letters())
    body = {"input_prefix": "a", "input_suffix": "c", "input_extra": [{"text": "o"}], "n_predict": 3, "cache_salt": "x"}
    job = await native_job(convert(body, InfillRequest), SamplingConfig(), model)
    assert ("".join(map(chr, job.tokens)), job.max_tokens, job.salt) == (
        "#myproject\n/tmp\no/filename\n<^a$c_",
        3,
        "x",
    )
    completion = await completion_job(
        convert({"prompt": ["a", "b"], "suffix": "c"}, CompletionRequest), SamplingConfig(), model
    )
    assert ["".join(map(chr, tokens)) for tokens in completion.prompts] == ["<^a$c_", "<^b$c_"]
    asked = convert({"prompt": "a", "suffix": "c", "system": "left out"}, OllamaGenerateRequest)
    asked.check()
    assert (await generate_job(asked, "a", SamplingConfig(), model)).tokens == [*map(ord, "<^a$c_")]


@pytest.mark.anyio
async def test_what_cannot_be_filled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Letters()
    with pytest.raises(Refusal) as caught:
        await completion_job(
            convert({"prompt": [1], "suffix": "c"}, CompletionRequest), SamplingConfig(), served(model)
        )
    assert caught.value.param == "prompt"
    monkeypatch.setattr(gaps, "MOST_LETTERS", 3)
    with pytest.raises(Refusal, match="4 letters, 3 are the most"):
        gap_tokens(model, "ab", "cd")
    monkeypatch.setattr(gaps, "MOST_LETTERS", 1000)
    model = Letters(context_tokens=90)
    with pytest.raises(ContextFull):
        await completion_job(
            convert({"prompt": ["a"] * 64, "suffix": "c" * 99}, CompletionRequest), SamplingConfig(), served(model)
        )
    assert model.n_letters == 100, "no other prompt is made"
    with pytest.raises(Refusal) as caught:
        infill_tokens(Letters(marks=None), Gap("a", "c"), None)  # type: ignore[arg-type]
    assert caught.value.code == "not_supported"
    for field, value in (("input_suffix", None), ("input_extra", [{"filename": "a"}])):
        with pytest.raises(Refusal, match=field):
            convert({"input_prefix": "a", "input_suffix": "c", field: value}, InfillRequest)


def test_an_answer_has_the_fields_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"content": "b", "timings": {"prompt_n": 3}}
    monkeypatch.setattr(NativeCompletionForm, "_document", lambda *_: document)
    outcome: Any = SimpleNamespace(content="b", generation=SimpleNamespace(token_ids=(), logprobs=()))
    fields = ["content", "timings/prompt_n", "content/x", "", "y"]
    for asked, wanted in (
        (fields, {"content": "b", "timings/prompt_n": 3}),
        ([""], {}),
        ([], document),
        (None, document),
    ):
        form = NativeCompletionForm("x", False, False, asked)
        form.begin(served(Letters()), outcome)
        assert json.loads(form.whole([outcome])) == wanted
