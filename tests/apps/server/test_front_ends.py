"""A front end and an agent of others against a server: llm (a command line), also with llm-ollama, and pydantic-ai."""

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.models.saying_model import SHOWING, saying_model
from support.processes.running_server import Running, messages, started

from edgedec_apps.embedding import embed

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "look", "arguments": {"what": "sky"}}</tool_call>'
SAYS = {"?": ["Two", " and", " two"], "!": [CALL], ".": ["Blue", " it is"], ":": ["At once"]}
LOOK = 'def look(what: str) -> str:\n    "Return the colour of a thing."\n    return f"The {what} is blue."\n'
Llm = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that says what is written above."""
    path = saying_model(tmp_path_factory.mktemp("front_ends") / "says.gguf", SAYS, chat_template=SHOWING)
    with started(path) as running:
        yield running


@pytest.fixture(scope="module")
def llm(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Llm:
    """The command line llm with the server as a model "edge": returns what it prints and what it prints to stderr."""
    if importlib.util.find_spec("llm") is None:
        pytest.skip("llm is not installed (pip install llm)")
    folder = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(
        f"- {{model_id: edge, model_name: says, api_base: '{running.url}/v1', "
        "supports_tools: true, supports_schema: true}\n"
        f"- {{model_id: edge-responses, model_name: says, api_base: '{running.url}/v1', "
        "responses: true, supports_tools: true}\n"
    )
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OLLAMA_HOST": running.url}

    def run(*words: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "llm", *words]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


def test_llm_chats(llm: Llm, running: Running) -> None:
    """llm prints the streamed text, and `-c` sends the earlier messages too."""
    told = [{"role": "system", "content": "Be brief."}, *messages("2 + 2?")]
    out, told_usage = llm("-m", "edge", "-s", "Be brief.", "2 + 2?", "-o", "temperature", "0", "-u")
    assert out == "Two and two\n"
    assert f"{len(running.engine.chat_ids(told))} input, 3 output" in told_usage
    told += [{"role": "assistant", "content": "Two and two"}, *messages("Really:")]
    out, told_usage = llm("-c", "Really:", "-u")
    assert out == "At once\n"
    assert f"{len(running.engine.chat_ids(told))} input" in told_usage


@pytest.mark.parametrize("model", ["edge", "edge-responses"])
def test_llm_calls_a_tool(llm: Llm, model: str) -> None:
    """llm runs the function that the model calls, and prints what the model makes of its result."""
    out, told = llm("-n", "-m", model, "--functions", LOOK, "--td", "Look!")
    assert out.strip() == "Blue it is"
    assert "look({'what': 'sky'})" in told
    assert "The sky is blue." in told


def test_llm_holds_the_answer_to_a_schema(llm: Llm) -> None:
    """`--schema` gives JSON of the schema, here in an answer that is not streamed."""
    schema = '{"type": "object", "properties": {}, "additionalProperties": false}'
    assert llm("-n", "-m", "edge", "--no-stream", "--schema", schema, "2 + 2?")[0] == "{}\n"


def test_llm_ollama_finds_the_model(llm: Llm) -> None:
    """The plug-in llm-ollama finds the server's model by itself, chats with it and lets it call a tool."""
    if importlib.util.find_spec("llm_ollama") is None:
        pytest.skip("llm-ollama is not installed (pip install llm-ollama)")
    assert llm("-n", "-m", "ollama/says", "2 + 2?", "-o", "draft_num_predict", "4")[0] == "Two and two\n"
    assert llm("-n", "-m", "ollama/says", "--functions", LOOK, "Look!")[0].strip() == "Blue it is"


def agents_model(interface: str, url: str) -> Any:
    """Return pydantic-ai's model of one interface of the server, or skip where pydantic-ai is not installed."""
    if interface == "anthropic":
        models = pytest.importorskip("pydantic_ai.models.anthropic", reason="pydantic-ai-slim[anthropic] is missing")
        providers = pytest.importorskip("pydantic_ai.providers.anthropic")
        return models.AnthropicModel("says", provider=providers.AnthropicProvider(base_url=url, api_key="none"))
    models = pytest.importorskip("pydantic_ai.models.openai", reason="pydantic-ai-slim[openai] is missing")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    kind = {"chat": models.OpenAIChatModel, "responses": models.OpenAIResponsesModel}[interface]
    return kind("says", provider=providers.OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


@pytest.mark.parametrize("interface", ["chat", "responses", "anthropic"])
def test_an_agent_of_pydantic_ai(running: Running, interface: str) -> None:
    """The agent answers, streams, and runs the tool that the model calls with the model's arguments."""
    model = agents_model(interface, running.url)
    pydantic_ai = pytest.importorskip("pydantic_ai")
    seen: list[str] = []

    def look(what: str) -> str:
        """Return the colour of a thing."""
        seen.append(what)
        return f"The {what} is blue."

    async def tried() -> tuple[str, str, str]:
        agent = pydantic_ai.Agent(model, instructions="Be brief.", tools=[look])
        async with model:
            plain = (await agent.run("2 + 2?")).output
            async with agent.run_stream("2 + 2?") as stream:
                streamed = "".join([part async for part in stream.stream_text(delta=True)])
            return plain, streamed, (await agent.run("Look!")).output

    assert asyncio.run(tried()) == ("Two and two", "Two and two", "Blue it is")
    assert seen == ["sky"]


def test_vectors_for_pydantic_ai(running: Running) -> None:
    """Its embedder gives the engine's vectors."""
    models = pytest.importorskip("pydantic_ai.embeddings.openai", reason="pydantic-ai-slim[openai] is missing")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    pydantic_ai, openai = pytest.importorskip("pydantic_ai"), pytest.importorskip("openai")
    texts = ["Hello", "A longer text"]

    async def vectors() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            model = models.OpenAIEmbeddingModel("says#mean", provider=providers.OpenAIProvider(openai_client=client))
            return (await pydantic_ai.Embedder(model).embed_documents(texts)).embeddings

    found = asyncio.run(vectors())
    assert np.array_equal(np.array(found, np.float32), embed(running.engine, texts, pooling="mean"))
