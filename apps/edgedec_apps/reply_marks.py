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
from edgedec_apps.call_forms import BRACKETED, KEYED, CallForm, derived_form

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


_ARG_VALUES = (("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))
_HERMES = CallForm("<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", '\n<tool_call>\n{"name": "')
_MISTRAL = CallForm("[TOOL_CALLS]", "", "[ARGS]", "")
_DEEPSEEK = CallForm(
    opens="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    closes="<｜tool▁call▁end｜>",
    again="<｜tool▁call▁begin｜>",
    ends="<｜tool▁calls▁end｜>",
)
_READ_DEEPSEEK = read_named_by(
    r"\s*<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?([\w.:-]+)\s*(?:<｜tool▁sep｜>|```json)\s*",
    r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?",
)
_KIMI = CallForm(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.",
    ":0<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_begin|>functions.",
    "<|tool_calls_section_end|>",
)
_READ_KIMI = read_named_by(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
    r"\s*(?:<\|tool_call_end\|>)?",
)


def _thoughts(family: Thoughts) -> Mark:
    """Return the mark of what a family thinks."""
    written = (family.opens + family.gap, family.written, family.alone)
    return Mark((family.opens,), "thinking", (family.closes,), only_first=family is THINK, written=written)


def _calls(
    opens: str, closes: str, read: Reader, starts: str, *quotes: tuple[str, str], form: CallForm | None = None
) -> Mark:
    """Return the mark of calls; where `closes` is empty, the last bracket closes them."""
    return Mark((opens,), "call", (closes,) if closes else (), read=read, starts=starts, quotes=quotes, form=form)


def _array(opens: str, closes: str, before_name: str = '{"name": "', arguments: str = "arguments") -> Mark:
    """Return the mark of an array of calls in JSON."""
    form = CallForm(opens, f"[{before_name}", f'", "{arguments}": ', "}", f", {before_name}", f"]{closes}")
    return _calls(opens, closes, read_tagged, "{[", _JSON_STRING, form=form)


def _section(closes: str, read: Reader, form: CallForm) -> Mark:
    """Return the mark of calls each of which has marks of its own."""
    return _calls(form.opens, closes, read, "<", _JSON_STRING, form=form)


MARKS: Mapping[str, tuple[Mark, ...]] = {
    "think": (_thoughts(THINK),),
    # GLM: keys and values in turns.
    "glm": (_calls("<tool_call>", "</tool_call>", read_arg_keys, "", _JSON_STRING, *_ARG_VALUES),),
    # Hermes, Qwen, Granite 4: JSON. Qwen 3.5, Nemotron 3: XML.
    "tool_call": (_calls("<tool_call>", "</tool_call>", read_tagged, "{[<", _JSON_STRING, _XML_VALUE, form=_HERMES),),
    # Models that write XML leave the tag around it out at times, or its beginning.
    "function": (
        _calls("<function=", "</function>", read_function, "", _XML_VALUE),
        Mark(("</tool_call>",), "text", read=read_function),
    ),
    "gemma4": (
        _thoughts(FAMILIES["<|channel>thought"]),
        _calls("<|tool_call>", "<tool_call|>", read_braces, "c", ('<|"|>', '<|"|>')),
        Mark(("<channel|>",), "text"),
    ),
    "functiongemma": (
        _calls("<start_function_call>", "<end_function_call>", read_braces, "c", ("<escape>", "<escape>")),
    ),
    # Gemma 3 has no marks of its own; this is the fence that its makers ask it for.
    "gemma3": (_calls("```tool_code", "```", read_code, "", _JSON_STRING),),
    # Calls in Python between two marks. Without the marks, Llama 4 writes such a list alone.
    "lfm2": (_calls("<|tool_call_start|>", "<|tool_call_end|>", read_python, "[{"),),
    "llama4": (_calls("<|python_start|>", "<|python_end|>", read_python, "[{"),),
    # SmolLM3 has tools in Python besides those in JSON; other code stays text.
    "smollm3": (_calls("<code>", "</code>", read_code, "", _JSON_STRING),),
    # Ministral 3 names the tool before its arguments; Mistral wrote an array in JSON.
    "mistral": (
        _thoughts(FAMILIES["[THINK]"]),
        _calls("[TOOL_CALLS]", "", read_named_json, "", _JSON_STRING, ("[ARGS]", ""), ("[CALL_ID]", ""), form=_MISTRAL),
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
    # DeepSeek and Kimi: each call has marks within those of all calls. R1 and V3 put arguments in a fence.
    "deepseek": (_section("<｜tool▁calls▁end｜>", _READ_DEEPSEEK, _DEEPSEEK),),
    "kimi": (_section("<|tool_calls_section_end|>", _READ_KIMI, _KIMI),),
    # MiniMax M2 and Seed-OSS: XML; the names of MiniMax stand in quotes.
    "minimax": (
        _calls("<minimax:tool_call>", "</minimax:tool_call>", read_tagged, "<", ("<parameter name=", "</parameter>")),
    ),
    "seed": (
        _thoughts(FAMILIES["<seed:think>"]),
        _calls("<seed:tool_call>", "</seed:tool_call>", read_tagged, "<", _XML_VALUE),
    ),
    # Command R7B and Command A: the text of an answer has marks, too, which are dropped.
    "cohere": (
        _thoughts(FAMILIES["<|START_RESPONSE|>"]),
        _array("<|START_ACTION|>", "<|END_ACTION|>", '{"tool_call_id": "0", "tool_name": "', "parameters"),
        Mark(("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"), "text"),
    ),
    "nemotron": (_array("<TOOLCALL>", "</TOOLCALL>"),),
    # Phi-4-mini, Granite 3: an array, which a mark may follow.
    "phi4": (
        _array("<|tool_call|>", ""),
        _array("functools", ""),
        Mark(("<|/tool_call|>",), "text", read=read_tagged),
    ),
    # When Granite 3 thinks, its answer stands between these tags.
    "granite3": (Mark(("<response>", "</response>"), "text"),),
}
_MOST_CHARACTERS = 200  # of a prompt's end, with white space
_ALWAYS = ("think", "tool_call")  # of many models, whose templates don't all have them
_SIGNS = {  # what a template or a vocabulary has of a family, where it is not its first mark
    "glm": ("<arg_key>",),
    "gemma3": ("<start_of_turn>",),
    "gemma4": ("<|channel>thought", "<|tool_call>"),
    "mistral": ("[THINK]", "[TOOL_CALLS]"),
    "seed": ("<seed:think>", "<seed:tool_call>"),
    "cohere": ("<|START_THINKING|>", "<|START_ACTION|>"),
    "phi4": ("<|tool_call|>", "functools["),
    "granite3": ("<response></response>",),
}


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
    """Return how a model writes a call; None for calls in Python and Gemma's braces, or a model without calls."""
    form = derived_form(template)
    if form:
        return form
    keyed = next((keyed for sign, keyed in KEYED.items() if sign in template), None)
    if form is not None or keyed is not None:
        return keyed
    names = [name for name in MARKS if name != "tool_call" and _is_there(name, template, tokenizer)]
    names += ["tool_call"] if _is_there("tool_call", template, tokenizer) else []
    return next((mark.form for name in names for mark in MARKS[name] if mark.kind == "call"), None)


def _is_there(name: str, template: str, tokenizer: Tokenizer | None) -> bool:
    """Return whether a template or a vocabulary has a family's sign."""
    signs = _SIGNS.get(name, MARKS[name][0].opens[:1])
    return any(sign in template or _token(tokenizer, sign) is not None for sign in signs)


def _derived_mark(form: CallForm) -> Mark:
    """Return the mark of calls of a form that no family of the table has."""
    closes = tuple(BRACKETED.findall(form.closes + form.ends)[-1:])
    read = either(read_tagged, read_named_by(*form.patterns()))
    return Mark((form.opens,), "call", closes, read=read, quotes=(_JSON_STRING,), form=form)


def hidden_marks(marks: tuple[Mark, ...], tokenizer: Tokenizer) -> dict[int, str]:
    """Return, by its id, each mark that is a control token, which adds nothing to a text."""
    texts = [part for mark in marks for part in (*mark.opens, *mark.closes, mark.head_ends, *sum(mark.quotes, ()))]
    texts += [mark.form.around for mark in marks if mark.form is not None]
    tokens = {text: _token(tokenizer, text) for text in set(BRACKETED.findall(" ".join(texts)))}
    return {i: text for text, i in tokens.items() if i is not None and not tokenizer.piece(i)}


def thinking_mark(marks: tuple[Mark, ...], template: str) -> Mark:
    """Return the mark of what the model of a chat template thinks: `<think>` unless the template has another one."""
    family = thoughts_family(template) or THINK
    before = family.opens + family.gap
    mark = next(mark for mark in marks if mark.written[0] == before)
    return replace(mark, written=(before, family.written, family.alone))


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
