"""What clients send without being asked to is never refused; what has no effect here is named in a header."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.processes.running_server import Running, messages

from edgedec_apps.server.core.fields import IGNORED_HEADER, Fields

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow

# By field: a value that clients send, and whether it is named among what was ignored.
CHAT: dict[str, tuple[Any, bool]] = {
    "audio": ({"voice": "x", "format": "wav"}, True),
    "frequency_penalty": (0, False),
    "logit_bias": ({}, False),
    "logprobs": (False, False),
    "max_completion_tokens": (3, False),
    "max_tokens": (3, False),
    "metadata": ({"trace": "1"}, False),
    "modalities": (["text"], False),
    "moderation": ({"model": "x"}, True),
    "n": (1, False),
    "parallel_tool_calls": (True, False),
    "prediction": ({"type": "content", "content": "x"}, False),
    "presence_penalty": (0, False),
    "prompt_cache_key": ("k", False),
    "prompt_cache_options": ({"mode": "implicit"}, False),
    "prompt_cache_retention": ("24h", False),
    "reasoning_effort": ("medium", True),
    "response_format": ({"type": "text"}, False),
    "safety_identifier": ("u", False),
    "seed": (7, False),
    "service_tier": ("flex", True),
    "stop": ([], False),
    "store": (True, True),
    "stream_options": ({}, False),
    "temperature": (1, False),
    "tool_choice": ("auto", False),
    "tools": ([], False),
    "top_logprobs": (0, False),
    "top_p": (1, False),
    "user": ("u", False),
    "verbosity": ("low", True),
}
REFUSED = {"function_call", "functions", "web_search_options"}
"""Fields that ask for what there is not; no client sends them by default."""


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    """OpenAI's client, pointed at the server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_every_field_of_openais_client_is_known() -> None:
    """Each parameter of the client's own type is tried below, or is refused on purpose."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    assert set(CompletionCreateParamsBase.__annotations__) - {"messages", "model"} == set(CHAT) | REFUSED


@pytest.mark.parametrize("name", CHAT)
def test_a_field_alone(client: Any, name: str) -> None:
    """Each field is accepted, and named in the header where it is ignored."""
    value, ignored = CHAT[name]
    asked = {"model": "tiny", "messages": messages("x"), "max_tokens": 3} | {name: value}
    reply = client.chat.completions.with_raw_response.create(**asked)
    assert reply.headers.get(IGNORED_HEADER) == (name if ignored else None)


def test_all_fields_together(client: Any) -> None:
    """In a stream, too, with the header before it begins."""
    asked = {name: value for name, (value, _) in CHAT.items()}
    asked |= {"model": "tiny", "messages": messages("x"), "stream": True, "stream_options": {"include_usage": True}}
    reply = client.chat.completions.with_raw_response.create(**asked)
    ignored = {name for name, (_, is_ignored) in CHAT.items() if is_ignored}
    assert set(reply.headers[IGNORED_HEADER].split(", ")) == ignored
    assert list(reply.parse())[-1].usage.completion_tokens == 3


def test_none_means_absent(client: Any) -> None:
    """-1 as seed and as limit, as llama-server's clients send it, stands for no seed and no limit."""
    body = {"seed": -1, "cache_prompt": True, "id_slot": -1}
    asked: dict[str, Any] = {"model": "tiny", "messages": messages("x"), "extra_body": body}
    reply = client.chat.completions.create(**asked, max_tokens=3)
    assert reply.usage.completion_tokens == 3
    body = {"ignore_end": True}
    reply = client.completions.create(model="tiny", prompt="x", max_tokens=-1, extra_body=body)
    assert reply.usage.completion_tokens == 512 - 2  # the context, not the 16 tokens of a request without the field


def test_messages_as_clients_have_them(client: Any) -> None:
    """Messages that other servers answered come back with their extra fields, and null where there is no text."""
    answer: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    answer |= {"tool_calls": [], "function_call": None, "reasoning_details": [{"type": "x"}], "name": None}
    chat = [*messages("x"), answer, {"role": "user", "content": [{"type": "text", "text": "y", "cache_control": {}}]}]
    assert client.chat.completions.create(model="tiny", messages=chat, max_tokens=2).choices[0].message


def test_the_header_is_safe() -> None:
    """What is named is printable ASCII without commas, of a bounded length, however a client calls it."""
    fields = Fields({"a": {"b": 1}})
    fields.object("a").ignore("b")
    assert fields.headers == {IGNORED_HEADER: "a.b"}
    for i in range(1000):
        fields.note_ignored("tools", f"ü\r\nx: {i}," + "y" * 1000)
        fields.inner({f"a{i}": 1}, f"messages[{i}]").end()
    (value,) = fields.headers.values()
    assert value.isascii()
    assert value.isprintable()
    assert len(value) < 4000
