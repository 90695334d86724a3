"""The marks by which models set apart what they think and the tools that they call, as a table.

A family of models has a few marks of its own, such as `<tool_call>` or `[THINK]`. `marks_of` chooses those that a model
knows: its chat template has them, or its vocabulary has them as tokens. `edgedec_apps.replies` splits a reply by them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgedec.thought_marks import FAMILIES, THINK, Thoughts, thoughts_family
from edgedec.tokenizer import Tokenizer
from edgedec_apps.call_bodies import (
    ToolCall,
    Tools,
    either,
    read_arg_keys,
    read_braces,
    read_channel,
    read_code,
    read_function,
    read_named_by,
    read_named_json,
    read_python,
    read_tagged,
)
from edgedec_apps.call_forms import BRACKETED, CallForm, derived_form

Kind = Literal["thinking", "call", "text"]
Reader = Callable[[str, str, Tools], list[ToolCall]]
"""Returns the calls of a head and a body; an empty list for a body that is no call."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark, and the part of a reply that it begins.

    Attributes:
        opens: The texts that the mark may have.
        kind: What the part is: what the model thinks, a call, or text, of which only the mark itself is dropped.
        closes: The texts that end the part. A call without any ends with its last bracket.
        head_ends: What ends the head behind the mark; empty where there is none.
        head: What a head must hold, so that the part is of this kind.
        only_first: Whether the mark is one only at the beginning of a reply.
        read: Reads a call; a mark that has it is text where no tool may be called.
        starts: The characters that a call may begin with, besides white space.
        quotes: What begins and ends a string in a call, in which nothing ends the call; an empty end is the next place.
        written: For a begun answer: what stands before a thought, between the thought and the text, and before a text
            without a thought.
        form: How a call is written; None where its arguments are no JSON.
    """

    opens: tuple[str, ...]
    kind: Kind
    closes: tuple[str, ...] = ()
    head_ends: str = ""
    head: re.Pattern[str] = re.compile("")
    only_first: bool = False
    read: Reader | None = None
    starts: str = ""
    quotes: tuple[tuple[str, str], ...] = ()
    written: tuple[str, str, str] = ("", "", "")
    form: CallForm | None = None


_JSON_STRING = ('"', '"')
_XML_VALUE = ("<parameter=", "</parameter>")
_CHANNELS = ("<|channel|>", "<|start|>assistant")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_IN_CHANNEL = "<|message|>"


def _thoughts(family: Thoughts) -> Mark:
    """Return the mark of what a family thinks."""
    written = (family.opens + family.gap, family.written, family.alone)
    return Mark((family.opens,), "thinking", (family.closes,), only_first=family is THINK, written=written)


def _listed(opens: str, closes: str, name: str = "name", arguments: str = "arguments") -> CallForm:
    """Return the form of an array of calls in JSON between two marks."""
    first = f'[{{{name}": "'
    return CallForm(opens, first, f'", "{arguments}": ', "}", f', {first[1:]}', f"]{closes}")


def _array(opens: str, closes: str, name: str = '"name', arguments: str = "arguments") -> Mark:
    """Return the mark of an array of calls in JSON between two marks."""
    form = _listed(opens, closes, name, arguments)
    return Mark((opens,), "call", (closes,), read=read_tagged, starts="{[", quotes=(_JSON_STRING,), form=form)


MARKS: Mapping[str, tuple[Mark, ...]] = {
    "think": (_thoughts(THINK),),
    # GLM: keys and values in turns.
    "glm": (
        Mark(
            ("<tool_call>",),
            "call",
            ("</tool_call>",),
            read=read_arg_keys,
            quotes=(_JSON_STRING, ("<arg_value>", "</arg_value>")),
        ),
    ),
    # Hermes, Qwen, Granite 4: JSON. Qwen 3.5, Nemotron 3: XML.
    "tool_call": (
        Mark(
            ("<tool_call>",),
            "call",
            ("</tool_call>",),
            read=read_tagged,
            starts="{[<",
            quotes=(_JSON_STRING, _XML_VALUE),
            form=CallForm("<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", '\n<tool_call>\n{"name": "'),
        ),
    ),
    # Models that write XML leave the tag around it out at times, or its beginning.
    "function": (
        Mark(("<function=",), "call", ("</function>",), read=read_function, quotes=(_XML_VALUE,)),
        Mark(("</tool_call>",), "text", read=read_function),
    ),
    "gemma4": (
        _thoughts(FAMILIES["<|channel>thought"]),
        Mark(
            ("<|tool_call>",),
            "call",
            ("<tool_call|>",),
            read=read_braces,
            starts="c",
            quotes=(('<|"|>', '<|"|>'),),
        ),
        Mark(("<channel|>",), "text"),
    ),
    "functiongemma": (
        Mark(
            ("<start_function_call>",),
            "call",
            ("<end_function_call>",),
            read=read_braces,
            starts="c",
            quotes=(("<escape>", "<escape>"),),
        ),
    ),
    # Gemma 3 has no marks of its own; this is the fence that its makers ask it for.
    "gemma3": (Mark(("```tool_code",), "call", ("```",), read=read_code, quotes=(_JSON_STRING,)),),
    "lfm2": (Mark(("<|tool_call_start|>",), "call", ("<|tool_call_end|>",), read=read_python, starts="[{"),),
    "llama4": (Mark(("<|python_start|>",), "call", ("<|python_end|>",), read=read_python, starts="[{"),),
    "smollm3": (Mark(("<code>",), "call", ("</code>",), read=read_code, quotes=(_JSON_STRING,)),),
    "mistral": (
        _thoughts(FAMILIES["[THINK]"]),
        Mark(
            ("[TOOL_CALLS]",),
            "call",
            read=read_named_json,
            quotes=(_JSON_STRING, ("[ARGS]", ""), ("[CALL_ID]", "")),
            form=CallForm("[TOOL_CALLS]", "", "[ARGS]", ""),
        ),
    ),
    # gpt-oss: the head of each message names a channel; the head of a call also names the tool that it goes to.
    "harmony": (
        Mark(
            _CHANNELS,
            "call",
            _ENDS,
            _IN_CHANNEL,
            re.compile(r"\bto=(?!assistant\b)"),
            read=read_channel,
            quotes=(_JSON_STRING,),
            form=CallForm("<|channel|>commentary to=functions.", "", " <|constrain|>json<|message|>", "<|call|>"),
        ),
        replace(
            _thoughts(FAMILIES["<|channel|>analysis"]),
            opens=_CHANNELS,
            closes=_ENDS,
            head_ends=_IN_CHANNEL,
            head=re.compile("<?analysis"),
        ),
        Mark(_CHANNELS, "text", head_ends=_IN_CHANNEL),
        Mark(_ENDS, "text"),
    ),
    "deepseek": (
        Mark(
            ("<｜tool▁calls▁begin｜>",),
            "call",
            ("<｜tool▁calls▁end｜>",),
            read=read_named_by(
                r"\s*<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?([\w.:-]+)\s*(?:<｜tool▁sep｜>|```json)\s*",
                r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?",
            ),
            starts="<",
            quotes=(_JSON_STRING,),
            form=CallForm(
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    "kimi": (
        Mark(
            ("<|tool_calls_section_begin|>",),
            "call",
            ("<|tool_calls_section_end|>",),
            read=read_named_by(
                r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
                r"\s*(?:<\|tool_call_end\|>)?",
            ),
            starts="<",
            quotes=(_JSON_STRING,),
            form=CallForm(
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>functions.",
                ":0<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "<|tool_call_begin|>functions.",
                "<|tool_calls_section_end|>",
            ),
        ),
    ),
    "minimax": (
        Mark(
            ("<minimax:tool_call>",),
            "call",
            ("</minimax:tool_call>",),
            read=read_tagged,
            starts="<",
            quotes=(("<parameter name=", "</parameter>"),),
        ),
    ),
    "seed": (
        _thoughts(FAMILIES["<seed:think>"]),
        Mark(("<seed:tool_call>",), "call", ("</seed:tool_call>",), read=read_tagged, starts="<", quotes=(_XML_VALUE,)),
    ),
    "cohere": (
        _thoughts(FAMILIES["<|START_RESPONSE|>"]),
        _array("<|START_ACTION|>", "<|END_ACTION|>", '"tool_call_id": "0", "tool_name', "parameters"),
        Mark(("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"), "text"),
    ),
    "nemotron": (_array("<TOOLCALL>", "</TOOLCALL>"),),
    # Phi-4-mini, Granite 3: an array, which a mark may end.
    "phi4": (
        Mark(
            ("<|tool_call|>", "functools"),
            "call",
            read=read_tagged,
            starts="[{",
            quotes=(_JSON_STRING,),
            form=_listed("<|tool_call|>", "", '"name'),
        ),
        Mark(("<|/tool_call|>",), "text", read=read_tagged),
    ),
    "granite3": (Mark(("<response>", "</response>"), "text"),),
}
_MOST_CHARACTERS = 200  # of a prompt's end, with white space
_ALWAYS = ("think", "tool_call")  # of many models, whose templates don't all have them
_SIGNS = {name: (next(mark.opens[0] for mark in marks if mark.kind != "text" or len(marks) == 1),) for name, marks in MARKS.items()} | {
    "glm": ("<arg_key>",),
    "gemma3": ("<start_of_turn>",),
    "gemma4": ("<|channel>thought", "<|tool_call>"),
    "mistral": ("[THINK]", "[TOOL_CALLS]"),
    "seed": ("<seed:think>", "<seed:tool_call>"),
    "cohere": ("<|START_THINKING|>", "<|START_ACTION|>"),
    "phi4": ("<|tool_call|>", "functools["),
    "granite3": ("<response></response>",),
}
"""What a template or a vocabulary has of a family."""


def marks_of(template: str, tokenizer: Tokenizer | None = None) -> tuple[Mark, ...]:
    """Return the marks that a model with this chat template and this tokenizer may write.

    A form of calls that the template writes and that no family here has is one of them.
    """
    names = {name for name in MARKS if name in _ALWAYS or _is_there(name, template, tokenizer)}
    marks = [mark for name in MARKS if name in names for mark in MARKS[name]]
    form = derived_form(template)
    if form and not any(form.opens in mark.opens for mark in marks):
        marks.append(_derived_mark(form))
    return tuple(marks)


def call_form(template: str, tokenizer: Tokenizer | None = None) -> CallForm | None:
    """Return how a model writes a call whose arguments are JSON; None for another form, or a model without calls."""
    form = derived_form(template)
    if form is not None:
        return form or None
    names = [name for name in MARKS if name != "tool_call" and _is_there(name, template, tokenizer)]
    names += ["tool_call"] if _is_there("tool_call", template, tokenizer) else []
    return next((mark.form for name in names for mark in MARKS[name] if mark.kind == "call"), None)


def _is_there(name: str, template: str, tokenizer: Tokenizer | None) -> bool:
    """Return whether a template or a vocabulary has a family's sign."""
    return any(sign in template or _token(tokenizer, sign) is not None for sign in _SIGNS[name])


def _derived_mark(form: CallForm) -> Mark:
    """Return the mark of calls of a form that no family of the table has."""
    closes = tuple(BRACKETED.findall(form.closes + form.ends)[-1:])
    read = either(read_tagged, read_named_by(*form.patterns()))
    return Mark((form.opens,), "call", closes, read=read, quotes=(_JSON_STRING,), form=form)


def hidden_marks(marks: tuple[Mark, ...], tokenizer: Tokenizer) -> dict[int, str]:
    """Return, by its id, each mark that is a control token, which adds nothing to a text."""
    texts = [part for mark in marks for part in (*mark.opens, *mark.closes, mark.head_ends, *sum(mark.quotes, ()))]
    tokens = {text: _token(tokenizer, text) for text in set(BRACKETED.findall(" ".join(texts)))}
    return {i: text for text, i in tokens.items() if i is not None and not tokenizer.piece(i)}


def thinking_mark(marks: tuple[Mark, ...], template: str) -> Mark:
    """Return the mark of what the model of a chat template thinks: `<think>` unless the template has another one."""
    family = thoughts_family(template) or THINK
    thinking = [mark for mark in marks if mark.kind == "thinking"]
    written = next((mark for mark in thinking if mark.written[0] == family.opens + family.gap), thinking[0])
    return replace(written, written=(written.written[0], family.written, family.alone))


def opened_mark(rendered: str, marks: tuple[Mark, ...]) -> str:
    """Return the mark with which a chat's prompt ends, so that a reply begins behind it; empty for none.

    >>> [opened_mark(prompt, MARKS["think"]) for prompt in ("<assistant><think>\\n", "<user>Say <think>.<assistant>")]
    ['<think>', '']
    """
    end = rendered[-_MOST_CHARACTERS:].rstrip()
    texts = (text for mark in marks if mark.kind == "thinking" for text in mark.opens)
    return next((text for text in texts if end.endswith(text)), "")


def _token(tokenizer: Tokenizer | None, text: str) -> int | None:
    """Return the id of a text that is a token; None for another text."""
    if tokenizer is None:
        return None
    token_ids = tokenizer.encode(text, add_special=False, parse_special=True)
    return token_ids[0] if len(token_ids) == 1 else None


def schemas_of(tools: tuple[dict[str, Any], ...]) -> Tools:
    """Return the JSON schema of the parameters of each tool by its name, of tools in OpenAI's form."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
