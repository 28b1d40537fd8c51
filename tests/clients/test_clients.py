"""What people use: each client's own first examples, against the server. Those that are not installed are skipped.

`make test-clients` installs all of them, those for Node from npm where that is there. The model is the bundled one,
whose words mean little: what counts is that a client understands the answers, and that forms that must be followed are.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit_models import KIT
from served import TEMPLATE, Served, served

NODE_CLIENTS = {"openai": "openai", "anthropic": "@anthropic-ai/sdk", "ollama": "ollama"}
NODE_FOLDER = Path(sys.prefix, "npm")  # where the Makefile has npm put them
QUESTION = "Tell me of the fox."
pytestmark = [
    pytest.mark.filterwarnings("default"),  # those of clients are not ours
    pytest.mark.anyio,
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(KIT, "-c", 8192, "-t", 1, "--chat-template", TEMPLATE, "-n", 200) as server:
        yield server


@pytest.fixture(scope="module")
def vectors() -> Iterator[Served]:
    with served(KIT, "-c", 512, "-t", 1, "--embeddings") as server:
        yield server


@pytest.fixture(scope="module")
def base(server: Served) -> str:
    return f"{server.url}/v1"


def need(name: str) -> Any:
    """Return a module, or skip the test where it is not installed."""
    pytest.importorskip(name.partition(".")[0])
    return importlib.import_module(name)


def test_ollama(server: Served) -> None:
    client = need("ollama").Client(host=server.url)
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat(model="kit", messages=messages, options={"temperature": 0, "num_predict": 8})
    parts = [
        part.message.content
        for part in client.chat(
            model="kit", messages=messages, stream=True, options={"temperature": 0, "num_predict": 8}
        )
    ]
    assert "".join(parts) == whole.message.content
    assert client.generate(model="kit", prompt=QUESTION, options={"num_predict": 4}).done
    assert client.list().models[0].model == "kit-dense-q4_0:latest"
    assert client.show("kit").template == TEMPLATE
    assert client.ps().models
    form = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    assert "ok" in client.chat(model="kit", messages=messages, format=form).message.content
    with pytest.raises(need("ollama").ResponseError, match="no such path"):
        client.delete("kit")


def test_langchain_openai(base: str) -> None:
    chat = need("langchain_openai").ChatOpenAI(model="kit", base_url=base, api_key="none", max_tokens=8, temperature=0)
    whole = chat.invoke(QUESTION)
    assert "".join(part.content for part in chat.stream(QUESTION)) == whole.content
    assert whole.usage_metadata["output_tokens"] == 8
    form = {"title": "Fox", "type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    chat = need("langchain_openai").ChatOpenAI(model="kit", base_url=base, api_key="none")
    assert isinstance(chat.with_structured_output(form, method="json_schema").invoke(QUESTION)["red"], bool)
    bound = chat.bind_tools([form], tool_choice="required")
    assert isinstance(bound.invoke(QUESTION).tool_calls[0]["args"]["red"], bool)


def test_langchain_ollama(server: Served) -> None:
    chat = need("langchain_ollama").ChatOllama(model="kit", base_url=server.url, num_predict=8, temperature=0)
    whole = chat.invoke(QUESTION)
    assert "".join(part.content for part in chat.stream(QUESTION)) == whole.content


def test_litellm(server: Served, base: str) -> None:
    litellm = need("litellm")
    messages = [{"role": "user", "content": QUESTION}]
    for model, where in (("openai/kit", base), ("anthropic/kit", server.url), ("ollama_chat/kit", server.url)):
        how = {"model": model, "messages": messages, "api_base": where, "api_key": "none", "max_tokens": 8}
        found = litellm.completion(**how)
        assert found.choices[0].message.content
        assert found.usage.completion_tokens == 8
        parts = [part.choices[0].delta.content or "" for part in litellm.completion(**how, stream=True)]
        assert "".join(parts)


def test_instructor(base: str) -> None:
    instructor, openai, pydantic = need("instructor"), need("openai"), need("pydantic")
    fox = pydantic.create_model("Fox", red=(bool, ...))
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=base, api_key="none"), mode=mode)
        asked = {"model": "kit", "messages": [{"role": "user", "content": QUESTION}], "response_model": fox}
        assert isinstance(client.chat.completions.create(**asked, max_retries=0).red, bool)


async def test_pydantic_ai(base: str) -> None:
    agents, models = need("pydantic_ai"), need("pydantic_ai.models.openai")
    providers, pydantic = need("pydantic_ai.providers.openai"), need("pydantic")
    model = models.OpenAIChatModel("kit", provider=providers.OpenAIProvider(base_url=base, api_key="none"))
    settings = {"max_tokens": 8}
    assert (await agents.Agent(model).run(QUESTION, model_settings=settings)).output
    fox = pydantic.create_model("Fox", red=(bool, ...))
    assert isinstance((await agents.Agent(model, output_type=fox).run(QUESTION)).output.red, bool)


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_openai_agents(base: str, api: str) -> None:
    agents, openai, pydantic = need("agents"), need("openai"), need("pydantic")
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
        model = getattr(agents, api)(model="kit", openai_client=client)
        fox = pydantic.create_model("Fox", red=(bool, ...))
        agent = agents.Agent(name="teller", instructions="Be kind.", model=model, output_type=fox)
        assert isinstance((await agents.Runner.run(agent, QUESTION)).final_output.red, bool)
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        assert "raw_response_event" in [event.type async for event in streamed.stream_events()]
        assert isinstance(streamed.final_output.red, bool)


@pytest.mark.parametrize("name", NODE_CLIENTS)
def test_of_npm(server: Served, vectors: Served, name: str) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    if not (NODE_FOLDER / "node_modules" / NODE_CLIENTS[name]).is_dir():
        pytest.skip(f"{NODE_CLIENTS[name]} is not in {NODE_FOLDER}: make test-clients")
    script = Path(__file__).with_name("clients.mjs")
    command = ["node", str(script), str(NODE_FOLDER), name, server.url, vectors.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


def test_openai_embeddings_errors_and_timeouts(server: Served, vectors: Served) -> None:
    openai = need("openai")
    of_vectors = openai.OpenAI(base_url=f"{vectors.url}/v1", api_key="none", max_retries=0)
    assert len(of_vectors.embeddings.create(model="kit", input=["fox", "hen"]).data) == 2
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "kit", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=8).choices[0].message.content
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**asked, "temperature": -1})
    assert refused.value.param == "temperature"
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.01).chat.completions.create(**asked, max_tokens=200)
    assert client.chat.completions.create(**asked, max_tokens=8).choices[0].message.content == whole


def test_anthropic_tools_errors_and_timeouts(server: Served) -> None:
    anthropic = need("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked = {"model": "kit", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200}
    form = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    tools = [{"name": "paint", "description": "Paints.", "input_schema": form}]
    found = client.messages.create(**asked, tools=tools, tool_choice={"type": "any"})
    assert isinstance(found.content[-1].input["red"], bool)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**asked, extra_body={"temperature": -1})
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.01).messages.create(**asked)


def test_ollama_embeddings(vectors: Served) -> None:
    client = need("ollama").Client(host=vectors.url)
    assert len(client.embed(model="kit", input=["fox", "hen"]).embeddings) == 2


async def test_at_once(base: str) -> None:
    """The asynchronous client, more often than answers share a pass."""
    import anyio

    texts: list[str] = []

    async def ask() -> None:
        found = await client.completions.create(model="kit", prompt="Once upon a time", max_tokens=20)
        texts.append(found.choices[0].text)

    async with (
        need("openai").AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client,
        anyio.create_task_group() as group,
    ):
        for _ in range(12):
            group.start_soon(ask)
    assert len(texts) == 12
