"""Chat templates in the forms of models of 2026: what they use renders as Jinja renders it, and as is expected."""

import json
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from support.texts.chat_families import CALL, EXPECTED, GEMMA4, GPT_OSS, LFM25, MINISTRAL, QWEN35, TOOLS, TURNS

from edgedec.chat import may_think, plain_schema, thinking_variables
from edgedec_runtimes.chat.template import ChatTemplate, with_field_names, with_text_calls_told


def template(name: str) -> ChatTemplate:
    """Compile the template of a family."""
    return ChatTemplate(EXPECTED[name][0], bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_chat_with_a_call_renders(name: str) -> None:
    """What was thought before the last question is dropped, what was thought for the call stays."""
    _, variables, expected = EXPECTED[name]
    assert template(name).render(TURNS, **{"tools": TOOLS, **variables}) == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_whose_arguments_are_no_object(name: str) -> None:
    """What a model wrote is told as text: where the template takes it, else in the content of the message."""
    broken = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": '{"at": 5'}}
    for calls in ([broken], [broken, CALL]):
        text = template(name).render(
            [*TURNS[:4], {"role": "assistant", "content": "Hm.", "tool_calls": calls}, TURNS[5]]
        )
        assert '{"at": 5' in text.replace('\\"', '"')
    assert with_text_calls_told(TURNS) == TURNS


FORMS: list[dict[str, Any]] = [{}, *({"parameters": form} for form in (None, {}, {"type": "object"}))]
FORMS += [{"parameters": {"type": "object", "properties": None, "required": None}}]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("form", FORMS)
def test_tools_without_parameters(name: str, form: dict[str, Any]) -> None:
    """A tool has no parameters in any of these forms; no null is told, and within a parameter there is none, too."""
    text = template(name).render(
        TURNS[:2], tools=[{"type": "function", "function": {"name": "now", "description": "d"} | form}]
    )
    assert "null" not in text
    inner = {
        "type": "object",
        "properties": {"at": {"type": "object", "properties": None, "default": {"required": None}}},
    }
    tool = {"type": "function", "function": {"name": "now", "description": "d", "parameters": inner}}
    assert template(name).render(TURNS[:2], tools=[tool])
    plain = plain_schema(inner)["properties"]["at"]
    assert plain == {"type": "object", "properties": {}, "default": {"required": None}}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "lfm2.5"])  # plain Jinja has no generation tag
def test_the_sandbox_renders_what_jinja_renders(name: str) -> None:
    """With and without tools and thinking, and for each beginning of the chat."""
    source, variables, _ = EXPECTED[name]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    plain.globals["raise_exception"] = None
    compiled, ours = plain.from_string(source), template(name)
    for n in range(2, len(TURNS) + 1):
        for given in (variables, {}, {"enable_thinking": False}, {"tools": None}):
            values = {"tools": TOOLS, "add_generation_prompt": True, **given}
            messages = with_field_names(TURNS[:n], source)
            expected = compiled.render(messages=messages, bos_token="<s>", eos_token="</s>", **values)
            assert ours.render(TURNS[:n], **values) == expected


@pytest.mark.slow
def test_thinking_is_switched_as_each_template_can() -> None:
    """By its variable, or by itself alone; the prompt then ends within a thought, behind one, or before the answer."""
    ends = {
        ("qwen35", True): "<think>\n",
        ("qwen35", False): "<think>\n\n</think>\n\n",
        ("gemma4", True): "<|turn>model\n",
        ("gemma4", False): "<|turn>model\n<|channel>thought\n<channel|>",
        ("gpt-oss", True): "<|start|>assistant",
    }
    for (name, think), end in ends.items():
        made = template(name)
        assert may_think(made.source)
        variables: dict[str, Any] = {**thinking_variables(made, think)}
        assert made.render(TURNS[:2], **variables).endswith(end)
    assert may_think(MINISTRAL)
    assert may_think(LFM25)


def test_fields_have_the_names_that_a_template_reads() -> None:
    """Only a template that reads other names gets them, and no message is changed in its place."""
    assert with_field_names(TURNS, QWEN35) == TURNS
    before = [dict(message) for message in TURNS]
    two = [*TURNS[:4], TURNS[4] | {"tool_calls": [CALL, CALL | {"id": "c2"}]}, {"role": "tool", "content": "a"}]
    two += [{"role": "tool", "content": "b", "tool_call_id": "c2"}, {"role": "tool", "content": "c", "name": "other"}]
    answers = with_field_names(two, GEMMA4)[-1]["tool_responses"]
    assert [(answer["name"], answer["response"]) for answer in answers] == [
        ("look", "a"),
        ("look", "b"),
        ("other", "c"),
    ]
    assert [message["role"] for message in with_field_names(TURNS[5:], GEMMA4)] == ["tool"]  # nobody called
    told = with_field_names([TURNS[4] | {"content": "Look:"}], GPT_OSS)[0]
    assert (told["thinking"], told["content"]) == ("I look.\n\nLook:", "")
    assert with_field_names([TURNS[2]], GPT_OSS)[0]["thinking"] == "Old."
    assert before == TURNS
