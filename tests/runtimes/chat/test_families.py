"""Chat templates in the forms of models of 2026: what they use renders as Jinja renders it, and as is expected."""

import json
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgedec.chat import may_think, plain_schema, thinking_variables
from edgedec_runtimes.chat.field_names import with_field_names, with_text_calls_told
from edgedec_runtimes.chat.template import ChatTemplate

Message = dict[str, Any]

TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "at": {"type": ["string"]}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "it's", "n": [1, True]}}}
TURNS: list[Message] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Sky?"},
    {"role": "assistant", "content": "Blue.", "reasoning_content": "Old."},
    {"role": "user", "content": "Now?"},
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "red", "tool_call_id": "c1"},
]

# The tail of the chat after the last user's message keeps what was thought, the rest does not.
QWEN35 = """{%- if not messages %}{{- raise_exception('No messages.') }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1, search=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.search and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.search = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == "system" and not loop.first %}{{- raise_exception('System first.') }}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set thought = message.reasoning_content | default('', true) | trim %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments|items %}
                {%- set value = value | tojson if value is mapping or (value is sequence and value is not string)
                    else value | string %}
                {{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}
{%- endif %}"""
GEMMA4 = """{%- macro argument(value, keys=True) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}{%- set ns = namespace(found=false) -%}
        {%- for key, each in value | dictsort -%}
            {%- if ns.found %},{% endif -%}{%- set ns.found = true -%}
            {%- if keys -%}{{- '<|"|>' + key + '<|"|>' -}}{%- else -%}{{- key -}}{%- endif -%}
            :{{- argument(each, keys=keys) -}}
        {%- endfor -%}{{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}{%- for each in value -%}{{- argument(each, keys=keys) -}}{{- ',' if not loop.last -}}{%- endfor -%}
        {{- ']' -}}
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- macro bare(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- set ns.result = ns.result + part.split('<|channel>')[0] -%}
    {%- endfor -%}{{- ns.result | trim -}}
{%- endmacro -%}
{%- set ns = namespace(before=None, last=-1) -%}
{%- set turns = messages -%}
{{- bos_token }}
{%- if (enable_thinking is defined and enable_thinking) or tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}{%- set turns = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] %}
        {%- set types = tool['function']['parameters']['properties'].values() | map(attribute='type') | list -%}
        {{- '<|tool>' + tool['function']['name'] + ':' + argument(types[1] | map('upper') | list) + '<tool|>' -}}
    {%- endfor %}
    {{- '<turn|>\\n' -}}
{%- endif %}
{%- for message in turns -%}
    {%- if message['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in turns -%}
    {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {%- set ns.before = None -%}
    {%- if message['tool_calls'] -%}
        {%- if message['reasoning_content'] and loop.index0 > ns.last -%}
            {{- '<|channel>thought\\n' + message['reasoning_content'] + '<channel|>' -}}
        {%- endif -%}
        {%- for call in message['tool_calls'] -%}
            {{- '<|tool_call>call:' + call['function']['name'] -}}
            {{- argument(call['function']['arguments'], keys=False) + '<tool_call|>' -}}
        {%- endfor -%}
    {%- endif -%}
    {%- for answer in message['tool_responses'] or [] -%}
        {{- '<|tool_response>response:' + answer['name'] | default('unknown') -}}
        {{- '{value:' + argument(answer['response'], keys=False) + '}<tool_response|>' -}}
        {%- set ns.before = 'tool_response' -%}
    {%- endfor -%}
    {{- bare(message['content']) -}}
    {%- if not (message['tool_responses'] and not message['content']) -%}{{- '<turn|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if ns.before != 'tool_response' -%}{{- '<|turn>model\\n' -}}{%- endif -%}
    {%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}
{%- endif -%}"""
LFM25 = """{{- bos_token -}}
{%- set preserve_thinking = preserve_thinking | default(false) -%}
{%- macro value_of(value) -%}
    {%- if value is string -%}{{- "'" + value + "'" -}}
    {%- elif value is mapping -%}{{- value | tojson -}}{%- else -%}{{- value | string -}}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(system="", last=-1) -%}
{%- if messages[0]["role"] == "system" -%}
    {%- if messages[0].get("content") -%}{%- set ns.system = messages[0]["content"] -%}{%- endif -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}{%- set ns.system = ns.system + "List of tools: " + (tools | tojson) -%}{%- endif -%}
{%- if ns.system -%}{{- "<|im_start|>system\\n" + ns.system + "<|im_end|>\\n" -}}{%- endif -%}
{%- for message in messages -%}
    {%- if message["role"] == "user" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}
        {%- if message.thinking is defined and (preserve_thinking or loop.index0 > ns.last) -%}
            {{- "<think>" + message.thinking + "</think>" -}}
        {%- endif -%}
        {%- set content = message.content -%}
        {%- if content.endswith("_TAG") -%}{%- set content = content[:(content | length) - 4] -%}{%- endif -%}
        {{- content -}}
        {%- if message.tool_calls is defined -%}
            {%- set ns_calls = namespace(found=[]) -%}
            {%- for call in message.tool_calls -%}
                {%- set ns_args = namespace(found=[]) -%}
                {%- for name, value in call["function"]["arguments"].items() -%}
                    {%- set ns_args.found = ns_args.found + [name + "=" + value_of(value)] -%}
                {%- endfor -%}
                {%- set ns_calls.found = ns_calls.found + [call["function"]["name"] + "("
                    + (ns_args.found | join(", ")) + ")"] -%}
            {%- endfor -%}
            {{- "<|tool_call_start|>[" + (ns_calls.found | join(", ")) + "]<|tool_call_end|>" -}}
        {%- endif -%}
        {{- "<|im_end|>\\n" -}}
        {%- endgeneration -%}
    {%- else %}
        {{- message["content"] + "<|im_end|>\\n" -}}
    {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}"""
GPT_OSS = """{%- macro type_of(spec) -%}
    {%- if spec.type is string -%}{{- spec.type -}}{%- else -%}{{- spec.type | join(' | ') -}}{%- endif -%}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>Reasoning: " + reasoning_effort + "<|end|>" }}
{%- if tools %}
    {{- "<|start|>developer<|message|>namespace functions {" }}
    {%- for tool in tools %}
        {%- for name, spec in tool.function.parameters.properties.items() %}
            {{- name + ": " + type_of(spec) + ("" if loop.last else ", ") }}
        {%- endfor %}
    {%- endfor %}
    {{- "}<|end|>" }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if "tool_calls" in message %}
            {%- if message.content and message.thinking %}{{- raise_exception("Not both.") }}{%- endif %}
            {%- if message.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments|tojson + "<|call|>" }}
            {%- set called.name = call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if called.name is none %}{{- raise_exception("Not called.") }}{%- endif %}
        {{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""
MINISTRAL = """{#- [THINK] #}{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' }}
    {%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- if tools is defined and tools is not none and tools|length > 0 %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}
    {%- if message.role == 'user' or (message.role == 'assistant' and (message.tool_calls is not defined
        or message.tool_calls is none or message.tool_calls | length == 0)) %}
        {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('Alternate.') }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call['function']['arguments'] %}
            {%- if arguments is not string %}{%- set arguments = arguments|tojson|safe %}{%- endif %}
            {{- '[TOOL_CALLS]' + call['function']['name'] + '[ARGS]' + arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS]' + message['content']|string + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

EXPECTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen35": (
        QWEN35,
        {},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSky?<|im_end|>\n"
        "<|im_start|>assistant\nBlue.<|im_end|>\n<|im_start|>user\nNow?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nI look.\n</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\nit's\n"
        "</parameter>\n<parameter=n>\n[1, true]\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nred\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "gemma4": (
        GEMMA4,
        {"enable_thinking": True},
        '<s><|turn>system\n<|think|>\nBe brief.<|tool>look:[<|"|>STRING<|"|>]<tool|><turn|>\n'
        "<|turn>user\nSky?<turn|>\n<|turn>model\nBlue.<turn|>\n<|turn>user\nNow?<turn|>\n"
        '<|turn>model\n<|channel>thought\nI look.<channel|><|tool_call>call:look{at:<|"|>it\'s<|"|>,n:[1,true]}'
        '<tool_call|><|tool_response>response:look{value:<|"|>red<|"|>}<tool_response|>',
    ),
    "lfm2.5": (
        LFM25,
        {"tools": None},
        "<s><|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nSky?<|im_end|>\n"
        "<|im_start|>assistant\nBlue.<|im_end|>\n<|im_start|>user\nNow?<|im_end|>\n"
        "<|im_start|>assistant\n<think>I look.</think><|tool_call_start|>[look(at='it's', n=[1, True])]"
        "<|tool_call_end|><|im_end|>\n<|im_start|>tool\nred<|im_end|>\n<|im_start|>assistant\n",
    ),
    "gpt-oss": (
        GPT_OSS,
        {"reasoning_effort": "low"},
        "<|start|>system<|message|>Reasoning: low<|end|><|start|>developer<|message|>namespace functions {n: integer, "
        "at: string}<|end|><|start|>user<|message|>Sky?<|end|><|start|>assistant<|channel|>final<|message|>Blue.<|end|>"
        "<|start|>user<|message|>Now?<|end|><|start|>assistant<|channel|>analysis<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": "it\'s", "n": [1, true]}'
        '<|call|><|start|>functions.look to=assistant<|channel|>commentary<|message|>"red"<|end|><|start|>assistant',
    ),
    "ministral3": (
        MINISTRAL,
        {"tools": []},
        "<s>[SYSTEM_PROMPT] Be brief. [/SYSTEM_PROMPT][INST]Sky?[/INST]Blue.</s>[INST]Now?[/INST][TOOL_CALLS]look[ARGS]"
        '{"at": "it\'s", "n": [1, true]}</s>[TOOL_RESULTS]red[/TOOL_RESULTS]',
    ),
}


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


FORMS: list[Message] = [{}, *({"parameters": form} for form in (None, {}, {"type": "object"}))]
FORMS += [{"parameters": {"type": "object", "properties": None, "required": None}}]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("form", FORMS)
def test_tools_without_parameters(name: str, form: Message) -> None:
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
