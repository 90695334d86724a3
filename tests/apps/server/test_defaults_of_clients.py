"""What clients send without being asked to is never refused; what has no effect here is named in a header."""

from typing import Any

import pytest
from support.processes.running_server import messages

from edgedec_apps.server.core.fields import IGNORED_HEADER, Fields

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow

# By field: a value that clients send, of fields that are honoured and of those that are named as ignored.
HONOURED: dict[str, Any] = {"frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "max_completion_tokens": 3}
HONOURED |= {"max_tokens": 3, "metadata": {"trace": "1"}, "modalities": ["text"], "n": 1, "parallel_tool_calls": True}
HONOURED |= {"prediction": {"type": "content", "content": "x"}, "presence_penalty": 0, "prompt_cache_key": "k"}
HONOURED |= {"prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h", "safety_identifier": "u"}
HONOURED |= {"response_format": {"type": "text"}, "seed": 7, "stop": [], "stream_options": {}, "temperature": 1}
HONOURED |= {"tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1, "user": "u"}
IGNORED: dict[str, Any] = {"audio": {"voice": "x", "format": "wav"}, "moderation": {"model": "x"}, "store": True}
IGNORED |= {"reasoning_effort": "medium", "service_tier": "flex", "verbosity": "low"}
CHAT = HONOURED | IGNORED
REFUSED = {"function_call", "functions", "web_search_options"}
"""Fields that ask for what there is not; no client sends them by default."""


def test_every_field_of_openais_client_is_known() -> None:
    """Each parameter of the client's own type is sent below, or is refused on purpose."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    assert set(CompletionCreateParamsBase.__annotations__) - {"messages", "model"} == set(CHAT) | REFUSED


def test_all_fields_together(client: Any) -> None:
    """Each is accepted, and named in the header where it is ignored; here in a stream, before it begins."""
    asked = CHAT | {"model": "tiny", "messages": messages("x"), "stream": True}
    asked |= {"stream_options": {"include_usage": True}}
    reply = client.chat.completions.with_raw_response.create(**asked)
    assert set(reply.headers[IGNORED_HEADER].split(", ")) == set(IGNORED)
    assert list(reply.parse())[-1].usage.completion_tokens == 3


def test_none_means_absent(client: Any) -> None:
    """-1 as seed and as limit, as llama-server's clients send it, stands for no seed and no limit."""
    body = {"seed": -1, "cache_prompt": True, "id_slot": -1, "ignore_end": True}
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
