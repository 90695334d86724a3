"""The marks by which models set apart what they think and the tools that they call, as a table.

A family of models has a few marks of its own, such as `<tool_call>` or `[THINK]`. `marks_of` chooses those that a model
knows: its chat template has them, or its vocabulary has them as tokens. `edgedec_apps.replies` splits a reply by them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgedec.tokenizer import Tokenizer
from edgedec_apps.call_bodies import (
    ToolCall,
    Tools,
    read_braces,
    read_channel,
    read_function,
    read_named_json,
    read_python,
    read_tagged,
)

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


_JSON_STRING = ('"', '"')
_XML_VALUE = ("<parameter=", "</parameter>")
_CHANNELS = ("<|channel|>", "<|start|>assistant")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_IN_CHANNEL = "<|message|>"

MARKS: Mapping[str, tuple[Mark, ...]] = {
    "think": (
        Mark(("<think>",), "thinking", ("</think>",), only_first=True, written=("<think>\n", "\n</think>\n\n", "")),
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
        ),
    ),
    # Models that write XML leave the tag around it out at times, or its beginning.
    "function": (
        Mark(("<function=",), "call", ("</function>",), read=read_function, quotes=(_XML_VALUE,)),
        Mark(("</tool_call>",), "text", read=read_function),
    ),
    "gemma4": (
        Mark(
            ("<|channel>thought",),
            "thinking",
            ("<channel|>",),
            written=("<|channel>thought\n", "\n<channel|>", ""),
        ),
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
    "lfm2": (Mark(("<|tool_call_start|>",), "call", ("<|tool_call_end|>",), read=read_python, starts="[{"),),
    "mistral": (
        Mark(("[THINK]",), "thinking", ("[/THINK]",), written=("[THINK]", "[/THINK]", "")),
        Mark(
            ("[TOOL_CALLS]",),
            "call",
            read=read_named_json,
            quotes=(_JSON_STRING, ("[ARGS]", ""), ("[CALL_ID]", "")),
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
        ),
        Mark(
            _CHANNELS,
            "thinking",
            _ENDS,
            _IN_CHANNEL,
            re.compile("<?analysis"),
            written=(
                "<|channel|>analysis<|message|>",
                "<|end|><|start|>assistant<|channel|>final<|message|>",
                "<|channel|>final<|message|>",
            ),
        ),
        Mark(_CHANNELS, "text", head_ends=_IN_CHANNEL),
        Mark(_ENDS, "text"),
    ),
}
_BRACKETED = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
_MOST_CHARACTERS = 200  # of a prompt's end, with white space
_ALWAYS = ("think", "tool_call")  # of many models, whose templates don't all have them
_FIRST_MARK = {name: marks[0].opens[0] for name, marks in MARKS.items()}
_OTHER_MARK = {"gemma4": "<|tool_call>", "mistral": "[TOOL_CALLS]"}


def marks_of(template: str, tokenizer: Tokenizer | None = None) -> tuple[Mark, ...]:
    """Return the marks that a model with this chat template and this tokenizer may write."""
    in_template: list[Mark] = []
    for name, marks in MARKS.items():
        texts = (_FIRST_MARK[name], _OTHER_MARK.get(name, _FIRST_MARK[name]))
        if name in _ALWAYS or any(text in template or _token(tokenizer, text) is not None for text in texts):
            in_template += marks
    return tuple(in_template)


def hidden_marks(marks: tuple[Mark, ...], tokenizer: Tokenizer) -> dict[int, str]:
    """Return, by its id, each mark that is a control token, which adds nothing to a text."""
    texts = [part for mark in marks for part in (*mark.opens, *mark.closes, mark.head_ends, *sum(mark.quotes, ()))]
    tokens = {text: _token(tokenizer, text) for text in set(_BRACKETED.findall(" ".join(texts)))}
    return {i: text for text, i in tokens.items() if i is not None and not tokenizer.piece(i)}


def thinking_mark(marks: tuple[Mark, ...], template: str) -> Mark:
    """Return the mark of what the model of a chat template thinks: `<think>` unless the template has another one."""
    thinking = [mark for mark in marks if mark.kind == "thinking"]
    there = [mark for mark in thinking if mark.written[0].strip() in template]
    return (there or thinking)[0]


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
