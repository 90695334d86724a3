"""Tool calls in replies, by the conventions of templates, whole and however a reply is cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedec_apps.tool_calls import ToolCall, ToolCallStream, parse_tool_calls, tool_call_schema

TIME = ToolCall("time", '{"zone": "UTC"}')
LIST = ToolCall("list", "{}")
REPLIES: dict[str, tuple[str, str, list[ToolCall]]] = {
    "qwen": ('<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>', "", [TIME]),
    "text before": ('Let me look.\n\n<tool_call>{"name": "list"}</tool_call>', "Let me look.", [LIST]),
    "two": (
        'Both:\n<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>\n',
        "Both:",
        [TIME, LIST],
    ),
    "text between": ('<tool_call>{"name": "list"}</tool_call>\nand <b>', "\nand <b>", [LIST]),
    "not closed": ('<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}', "", [TIME]),
    "arguments as text": (
        '<tool_call>{"name": "time", "arguments": "{\\"zone\\": \\"UTC\\"}"}</tool_call>',
        "",
        [TIME],
    ),
    "llama": ('{"name": "time", "parameters": {"zone": "UTC"}}', "", [TIME]),
    "llama with its tag": ('<|python_tag|>{"name": "time", "parameters": {"zone": "UTC"}}', "", [TIME]),
    "llama, two": (
        '{"name": "time", "parameters": {"zone": "UTC"}}; {"name": "list", "parameters": {}}',
        "",
        [TIME, LIST],
    ),
    "openai": ('{"type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}', "", [TIME]),
    "array": ('[{"name": "time", "arguments": {"zone": "UTC"}}, {"name": "list", "arguments": {}}]', "", [TIME, LIST]),
    "fence": ('```json\n{"name": "list", "arguments": {}}\n```\n', "", [LIST]),
    # Text that stays text:
    "empty": ("", "", []),
    "words": ("  Nothing to call. ", "  Nothing to call. ", []),
    "json": ('{"answer": {"name": "x"}}', '{"answer": {"name": "x"}}', []),
    "no arguments": ('{"name": "Ada"}', '{"name": "Ada"}', []),
    "another tool": ('{"name": "rm", "arguments": {}}', '{"name": "rm", "arguments": {}}', []),
    "broken": ('<tool_call>{"name": </tool_call> so ', '<tool_call>{"name": </tool_call> so ', []),
    "half a tag": ("a <tool_call", "a <tool_call", []),
    "arguments are no object": ('<tool_call>{"name": "list", "arguments": [1]}</tool_call>',) * 2 + ([],),
    "code": ("```python\nprint(1)\n```", "```python\nprint(1)\n```", []),
    "json and words": ('{"name": "list", "arguments": {}} is it', '{"name": "list", "arguments": {}} is it', []),
    "deep": ("[" * 100_000, "[" * 100_000, []),
}
NAMES = {"time", "list"}


@pytest.mark.parametrize("name", REPLIES)
def test_replies_are_read(name: str) -> None:
    """The calls in order, and the text without them; what only looks like a call stays in the text."""
    reply, content, calls = REPLIES[name]
    assert parse_tool_calls(reply, NAMES) == (content, calls)


@given(st.sampled_from([name for name in REPLIES if name != "deep"]), st.data())
def test_pieces_add_up_to_the_whole(name: str, data: st.DataObject) -> None:
    """However a reply is cut, text and calls are those of the whole."""
    reply, *expected = REPLIES[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=6)))
    stream = ToolCallStream(NAMES)
    parts = [stream.feed(reply[start:end]) for start, end in pairwise([0, *cuts, len(reply)])] + [stream.finish()]
    assert "".join(text for text, _ in parts) == expected[0]
    assert [call for _, calls in parts for call in calls] == expected[1]


def test_text_comes_as_soon_as_it_is_certain() -> None:
    """Text is held back only where a tag may begin, and a call comes with the tag that closes it."""
    stream = ToolCallStream()
    assert stream.feed("Well, ") == ("Well,", [])
    assert stream.feed("a < b") == (" a < b", [])
    assert stream.feed(" <tool_") == ("", [])
    assert stream.feed('call>{"name": "list"') == ("", [])
    assert stream.feed("}</tool_call>") == ("", [LIST])
    assert stream.finish() == ("", [])
    other = ToolCallStream()
    assert other.feed('{"ans') == ("", [])
    assert other.feed('wer": 1') == ('{"answer": 1', [])


def test_calls_have_openais_shape() -> None:
    """An id of its own, and arguments as text, in which characters are what they are."""
    _, calls = parse_tool_calls('{"name": "say", "arguments": {"text": "gr\u00fcn"}}')
    entry = calls[0].as_dict()
    assert entry == {
        "id": calls[0].id,
        "type": "function",
        "function": {"name": "say", "arguments": '{"text": "gr\u00fcn"}'},
    }
    ids = {parse_tool_calls('{"name": "a", "arguments": {}}')[1][0].id for _ in range(9)}
    assert len(ids) == 9
    assert all(name.startswith("call_") for name in ids)


def test_a_schema_asks_for_one_of_the_tools() -> None:
    """What is valid under it is read as a call of the tool."""
    parameters = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "time", "parameters": parameters}},
        {"type": "function", "function": {"name": "list"}},
    ]
    first, second = tool_call_schema(tools)["anyOf"]
    assert first["properties"] == {"name": {"const": "time"}, "arguments": parameters}
    assert second["properties"]["arguments"] == {"type": "object"}
    value = {"name": "time", "arguments": {"zone": "UTC"}}
    assert parse_tool_calls(json.dumps(value), NAMES) == ("", [TIME])
