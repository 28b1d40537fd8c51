"""What is generated for a request: salts, how many answers and tokens, and tokens that there are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server.apis.anthropic_messages import MessagesRequest, messages
from edge_run.runtime.server.apis.llama_server import NativeCompletionRequest, completion, native_job
from edge_run.runtime.server.apis.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    generate_job,
    ollama_chat,
    ollama_generate,
)
from edge_run.runtime.server.apis.openai_chat import ChatRequest, chat_completions, chat_job
from edge_run.runtime.server.apis.openai_completions import QUICK_TOKENS, CompletionRequest, completion_job, completions
from edge_run.runtime.server.apis.responses import ResponsesRequest, responses
from edge_run.runtime.server.bodies import convert
from edge_run.runtime.server.catalogue.served_model import AnswerDefaults, Preparing, ServedModel
from edge_run.runtime.server.counts import Counts
from edge_run.runtime.server.generating import Job
from edge_run.runtime.server.refusals import Refusal

pytestmark = pytest.mark.anyio

Make = Callable[[Any, SamplingConfig, ServedModel], Awaitable[Job]]
USUAL = SamplingConfig()
MESSAGES = [{"role": "user", "content": "Hello"}]
VOCABULARY = 256


class Letters:
    """A model of which each letter is a token."""

    context_tokens, has_chat_template, chat_template = 64, True, ""

    def __init__(self, keeps_prompts: bool = False) -> None:
        self.keeps_prompts = keeps_prompts

    def prompt_tokens(self, text: str) -> list[int]:
        return [*text.encode()]

    def chat_prompt(self, messages: Any, variables: Any) -> str:
        return "prompt"

    def check_tokens(self, what: str, tokens: Iterable[int]) -> None:
        if max(tokens) >= VOCABULARY:
            raise ConfigError(f"{what}: no such token")


def served(keeps_prompts: bool = False) -> ServedModel:
    model: Any = Letters(keeps_prompts)
    return ServedModel("x", model, None, AnswerDefaults(), Preparing(), Counts())  # type: ignore[arg-type]


async def task_job(asked: Any, sampling: SamplingConfig, model: ServedModel) -> Job:
    job: Job = await asked.task().job(model, sampling, 1)
    return job


async def prompt_job(asked: OllamaGenerateRequest, sampling: SamplingConfig, model: ServedModel) -> Job:
    return await generate_job(asked, asked.prompt or "", sampling, model)


@pytest.mark.parametrize(
    ("make_job", "kind", "body"),
    [
        (native_job, NativeCompletionRequest, {"prompt": "a"}),
        (completion_job, CompletionRequest, {"prompt": "a"}),
        (chat_job, ChatRequest, {"messages": MESSAGES}),
        (task_job, MessagesRequest, {"messages": MESSAGES, "max_tokens": 1}),
        (task_job, ResponsesRequest, {"input": "a"}),
        (task_job, OllamaChatRequest, {"messages": MESSAGES}),
        (prompt_job, OllamaGenerateRequest, {"prompt": "a"}),
        (prompt_job, OllamaGenerateRequest, {"prompt": "a", "raw": True}),
    ],
)
async def test_a_salt_counts_at_every_api(make_job: Make, kind: type, body: dict[str, Any]) -> None:
    assert (await make_job(convert(body, kind), USUAL, served())).salt == ""
    salted: Any = convert({**body, "cache_salt": "x"}, kind)
    assert (await make_job(salted, USUAL, served())).salt == "x"
    with pytest.raises(Refusal, match="cache_salt"):
        await make_job(salted, USUAL, served(keeps_prompts=True))


@pytest.mark.parametrize(
    ("make_job", "kind", "body", "choices", "most"),
    [
        (native_job, NativeCompletionRequest, {}, 1, None),
        (native_job, NativeCompletionRequest, {"n": 2, "max_tokens": 7}, 2, 7),
        (native_job, NativeCompletionRequest, {"n": 2, "n_cmpl": 3, "max_completion_tokens": 5, "max_tokens": 7}, 3, 5),
        (native_job, NativeCompletionRequest, {"n_predict": 0, "max_completion_tokens": 5}, 1, 0),
        (completion_job, CompletionRequest, {}, 1, 16),
        (completion_job, CompletionRequest, {"n": 2, "max_completion_tokens": 5, "max_tokens": 7}, 2, 5),
    ],
)
async def test_how_many_answers_and_tokens(
    make_job: Make, kind: type, body: dict[str, Any], choices: int, most: int | None
) -> None:
    job = await make_job(convert({"prompt": "a", **body}, kind), USUAL, served())
    assert (job.choices, job.max_tokens) == (choices, most)
    many = {**body, "prompt": ["a"] * 5, "n": 16, "n_cmpl": 16}
    with pytest.raises(Refusal, match="more than 64 answers"):
        await make_job(convert(many, kind), USUAL, served())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (NativeCompletionRequest, {"prompt": "a"}),
        (CompletionRequest, {"prompt": "a"}),
        (ChatRequest, {"messages": MESSAGES}),
    ],
)
def test_a_schema_in_the_words_of_llama_server_is_followed(kind: type, body: dict[str, Any]) -> None:
    asked: Any = convert({**body, "json_schema": {"type": "boolean"}}, kind)
    assert asked.sampling(USUAL).json_schema_text == '{"type": "boolean"}'


@pytest.mark.parametrize(
    ("make_job", "kind"), [(native_job, NativeCompletionRequest), (completion_job, CompletionRequest)]
)
async def test_tokens_that_there_are_not_are_refused_before_the_model_is_asked(make_job: Make, kind: type) -> None:
    for prompt in ([VOCABULARY], [[1], [VOCABULARY]]):
        with pytest.raises(ConfigError, match="prompt: no such token"):
            await make_job(convert({"prompt": prompt}, kind), USUAL, served())


class Full(Preparing):
    """Threads that others' templates have; what is put off until there is one is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.n_refused = 0

    async def run(self, key: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self.n_refused += 1
        raise Refusal(429, "too many", code="queue_full")


async def test_a_prompt_of_tokens_does_not_queue_behind_the_templates_of_others() -> None:
    model, full = served(), Full()
    model._preparing = full
    short = {"prompt": [[1, 2], [3]]}
    job = await completion_job(convert(short, CompletionRequest), USUAL, model)
    assert list(job.prompts) == [[1, 2], [3]]
    with pytest.raises(Refusal, match="too many"):
        await completion_job(convert({"prompt": [[1] * QUICK_TOKENS] * 2}, CompletionRequest), USUAL, model)
    assert full.n_refused == 1, "what would hold up all other requests for long"


LONG = {"enum": ["x" * 70_000]}
FORM = {"type": "json_schema", "schema": LONG}


@pytest.mark.parametrize(
    ("handler", "kind", "body", "param"),
    [
        (completion, NativeCompletionRequest, {"prompt": "a", "json_schema": LONG}, "json_schema"),
        (completions, CompletionRequest, {"prompt": "a", "json_schema": LONG}, "json_schema"),
        (chat_completions, ChatRequest, {"messages": MESSAGES, "response_format": FORM}, "response_format"),
        (chat_completions, ChatRequest, {"messages": MESSAGES, "json_schema": {}, "grammar": "a"}, "grammar"),
        (responses, ResponsesRequest, {"input": "a", "text": {"format": FORM}}, "text.format"),
        (messages, MessagesRequest, {"messages": MESSAGES, "max_tokens": 1, "output_config": {"format": FORM}},
         "output_config.format.schema"),
        (ollama_chat, OllamaChatRequest, {"messages": MESSAGES, "format": LONG}, "format"),
        (ollama_generate, OllamaGenerateRequest, {"prompt": "a", "format": "xml"}, "format"),
    ],
)  # fmt: skip
async def test_what_cannot_be_chosen_by_is_refused_before_a_model_is_opened(
    handler: Callable[[Any, Any], Awaitable[object]], kind: type, body: dict[str, Any], param: str
) -> None:
    """The model that a request names may have to be opened for it, and another one closed."""

    async def read(*_: object) -> object:
        return convert({"model": "a", **body}, kind)

    catalogue = SimpleNamespace(asked=lambda name: SimpleNamespace(name="a"))
    service: Any = SimpleNamespace(read=read, catalogue=catalogue, defaults=AnswerDefaults())
    with pytest.raises(Refusal) as caught:
        await handler(service, SimpleNamespace(scope={}))
    assert caught.value.param == param
