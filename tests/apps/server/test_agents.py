"""Libraries of agents: a call of a tool, its result and an answer, and a schema behind thoughts, whole and streamed."""

import json
from collections.abc import Callable, Iterator
from functools import reduce
from operator import add
from typing import Any

import pytest
from support.models.saying_model import saying_model
from support.processes.running_server import Running, messages, started

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of others' libraries

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    '{% for c in m.tool_calls %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments '
    "| tojson }}}\n</tool_call>{% endfor %}{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"
    "{{ 'R' if messages[-1].role == 'tool' and messages[-2].tool_calls else 'C' if tools else 'J' }}"
)
THINKS = ["<think>", "I ", "look.", "</think>"]
# What a grammar leaves open: what a text is, a number, and the end behind a call.
VALUES = {'"': ["Oslo", '"'], " ": ["3", "}"], ">": []}
SAYS = {"calls": {"C": [*THINKS, "<tool_call>"], "R": ["Rain ", "in ", "Oslo."]}, "plans": {"J": [*THINKS, "{"]}}
WEATHER = {"city": "Oslo", "days": 3}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
ASKED = messages("Weather?")
EXPECTED = ("I look.", WEATHER, "Rain in Oslo.", "I look.", WEATHER)
Told = tuple[Any, Any, Any, Any, Any]
"""What was thought before the call, the arguments, the answer; what was thought before the JSON, and the JSON."""


def library(name: str) -> Any:
    """Return a module, or skip where its library is not installed."""
    return pytest.importorskip(name, reason=f"{name.partition('.')[0]} is not installed")


def weather(city: str, days: int) -> str:
    """Tell the weather."""
    assert {"city": city, "days": days} == WEATHER
    return "Rain."


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that calls and one that writes JSON, both of which think before."""
    folder = tmp_path_factory.mktemp("agents")
    paths = [saying_model(folder / f"{k}.gguf", v | VALUES, chat_template=TEMPLATE) for k, v in SAYS.items()]
    with started(*paths, load_options={"n_ctx": 2048}) as running:
        yield running


@pytest.fixture
def schema() -> Any:
    """The schema as a class of pydantic."""
    return library("pydantic").create_model("Weather", city=(str, ...), days=(int, ...))


def openai_chat(url: str, schema: Any, *, stream: bool) -> Told:
    """OpenAI's client of chats."""
    chats = library("openai").OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions

    def ask(model: str, chat: Any, **more: Any) -> Any:
        if not stream:
            return chats.parse(model=model, messages=chat, **more).choices[0].message
        with chats.stream(model=model, messages=chat, **more) as events:
            return events.get_final_completion().choices[0].message

    called, made = ask("calls", ASKED, tools=[TOOL]), ask("plans", ASKED, response_format=schema)
    (call,) = called.tool_calls
    chat = [*ASKED, called, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    answer, arguments = ask("calls", chat, tools=[TOOL]).content, json.loads(call.function.arguments)
    return called.reasoning_content, arguments, answer, made.reasoning_content, made.parsed.model_dump()


def openai_responses(url: str, schema: Any, *, stream: bool) -> Told:
    """OpenAI's client of responses, which reads summaries."""
    responses = library("openai").OpenAI(base_url=f"{url}/v1", api_key="none").responses

    def ask(model: str, items: Any, **more: Any) -> Any:
        asked = {"model": model, "input": items, "reasoning": {"summary": "auto"}} | more
        if not stream:
            return responses.parse(**asked)
        with responses.stream(**asked) as events:
            return events.get_final_response()

    tools = [{"type": "function"} | FUNCTION]
    thought, call = ask("calls", ASKED, tools=tools).output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    answer, made = ask("calls", [*ASKED, thought, call, result], tools=tools), ask("plans", ASKED, text_format=schema)
    shown = [item.summary[0].text for item in (thought, made.output[0])]
    return shown[0], json.loads(call.arguments), answer.output_text, shown[1], made.output_parsed.model_dump()


def anthropic(url: str, schema: Any, *, stream: bool) -> Told:
    """Anthropic's client, which wants thoughts to be signed."""
    client = library("anthropic").Anthropic(base_url=url, api_key="none").messages
    tools, thinking = [{"name": "weather", "input_schema": SCHEMA}], {"type": "enabled", "budget_tokens": 1024}

    def ask(model: str, chat: Any, **more: Any) -> Any:
        asked = more | {"model": model, "messages": chat, "max_tokens": 1500, "thinking": thinking}
        if not stream:
            return client.parse(**asked)
        with client.stream(**asked) as events:
            return events.get_final_message()

    called, made = ask("calls", ASKED, tools=tools), ask("plans", ASKED, output_format=schema)
    (thought, call), (planned, _) = called.content, made.content
    assert all(each.signature for each in (thought, planned))
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}]
    chat = [*ASKED, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    answer = ask("calls", chat, tools=tools).content[-1].text
    return thought.thinking, call.input, answer, planned.thinking, made.parsed_output.model_dump()


def ollama(url: str, schema: Any, *, stream: bool) -> Told:
    """ollama's client."""
    client = library("ollama").Client(host=url)

    def ask(model: str, chat: Any, **more: Any) -> tuple[str, str, list[Any]]:
        reply = client.chat(model, chat, think=True, stream=stream, **more)
        parts = [part.message for part in (reply if stream else [reply])]
        calls = [call.function.arguments for part in parts for call in part.tool_calls or ()]
        return "".join(p.thinking or "" for p in parts), "".join(p.content or "" for p in parts), calls

    thought, _, (arguments,) = ask("calls", ASKED, tools=[weather])
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}
    result = {"role": "tool", "tool_name": "weather", "content": "Rain."}
    planned, text, _ = ask("plans", ASKED, format=schema.model_json_schema())
    return thought, arguments, ask("calls", [*ASKED, call, result], tools=[weather])[1], planned, json.loads(text)


def langchain(url: str, schema: Any, *, stream: bool) -> Told:
    """langchain-openai, which has thoughts as summaries of responses."""
    chats, tools = library("langchain_openai"), library("langchain_core.tools")
    options = {"base_url": f"{url}/v1", "api_key": "none", "use_responses_api": True, "output_version": "v1"}
    calls, plans = (chats.ChatOpenAI(model=m, reasoning={"summary": "auto"}, **options) for m in SAYS)

    def ask(model: Any, chat: Any) -> Any:
        return reduce(add, model.stream(chat)) if stream else model.invoke(chat)

    called = ask(calls.bind_tools([tools.tool(weather)], strict=True), "Weather?")
    (call,) = called.tool_calls
    chat = [*ASKED, called, {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}]
    made = ask(plans.bind(response_format=schema), "Weather?")
    answer = ask(calls.bind_tools([tools.tool(weather)]), chat).text
    shown = [message.content_blocks[0]["reasoning"] for message in (called, made)]
    return shown[0], call["args"], answer, shown[1], json.loads(made.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", [openai_chat, openai_responses, anthropic, ollama, langchain])
def test_a_call_and_a_schema_after_thoughts(
    running: Running, client: Callable[..., Told], stream: bool, schema: Any
) -> None:
    """The library finds the call, sends its result back and has the answer; it finds the thoughts and the JSON."""
    assert client(running.url, schema, stream=stream) == EXPECTED


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_runner_of_tools(running: Running, stream: bool) -> None:
    """It asks for a conversation that is kept here, and when that is refused sends all messages."""
    sdk = library("anthropic")
    client = sdk.Anthropic(base_url=running.url, api_key="none", max_retries=0).beta.messages
    asked = {"model": "calls", "max_tokens": 300, "messages": ASKED, "tools": [sdk.beta_tool(weather)]}
    last = [turn.get_final_message() if stream else turn for turn in client.tool_runner(**asked, stream=stream)][-1]
    assert last.content[-1].text == "Rain in Oslo."
