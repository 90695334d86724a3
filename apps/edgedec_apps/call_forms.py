"""How a call of a tool is written, where its arguments are JSON, learnt from the model's chat template.

The template renders an answer that calls a tool twice; what stands around the names and the arguments is the form.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from re import compile as regex
from re import escape
from typing import Any, Literal

from edgedec.chat import ChatTemplate, open_template
from edgedec.errors import EdgedecError
from edgedec.thought_marks import FAMILIES

BRACKETED = regex(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
_ID = "call00000"  # of the nine letters and digits that templates of Mistral ask for
_MOST_CHARACTERS = 10_000  # that are looked at
# Texts that no template has.
_NAME, _SAID, _ASKED = "zqlook", "Zqsaid.", "Zqasked."
_ARGUMENTS: dict[str, Any] = {"zqkey": "zqvalue", "n": 5}


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written: opens, before_name, NAME, before_arguments, ARGUMENTS, closes, ends.

    Attributes:
        opens: The mark with which calls begin.
        before_name: What stands between that mark and the name of the first tool.
        before_arguments: What stands between the name and the arguments, which are an object of JSON unless `keyed`.
        closes: What stands behind the arguments of every call.
        again: What stands between `closes` and the name of one more tool.
        ends: What ends the calls behind the last one's `closes`; where it is empty, text may follow that.
        keyed: Where the arguments are keys and values: what stands before a key, between key and value, and behind the
            value, which is a text, or JSON for other types; else empty.
    """

    opens: str
    before_name: str
    before_arguments: str
    closes: str
    again: str = ""
    ends: str = ""
    keyed: tuple[str, str, str] | tuple[()] = ()

    @property
    def around(self) -> str:
        """All that stands around names and arguments."""
        return self.opens + self.before_name + self.before_arguments + self.closes + self.again + self.ends

    def patterns(self) -> tuple[str, str, str]:
        """Return regular expressions of what stands before arguments, with the name, behind them, and before the end.

        White space may be anywhere, and an id may be any. The end is the last mark, so it is none of them.
        """
        again = self.again.removeprefix(self.opens) or self.before_name
        before = rf"(?:{_loose(self.before_name)}|{_loose(again)})\s*([\w.:-]+?){_loose(self.before_arguments)}\s*"
        closes = self.closes if self.ends else BRACKETED.split(self.closes)[0]
        return before, _loose(closes), _loose(BRACKETED.split(self.ends)[0])


_XML = CallForm("<tool_call>", "\n<function=", ">\n", "</function>\n</tool_call>")
KEYED = {
    "<arg_key>": CallForm(
        "<tool_call>", "", "\n", "</tool_call>", keyed=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    ),
    "<minimax:tool_call>": CallForm(
        "<minimax:tool_call>",
        '\n<invoke name="',
        '">\n',
        "</invoke>\n</minimax:tool_call>",
        keyed=('<parameter name="', '">', "</parameter>\n"),
    ),
    "<seed:tool_call>": replace(
        _XML,
        opens="<seed:tool_call>",
        closes="</function>\n</seed:tool_call>",
        keyed=("<parameter=", ">", "</parameter>\n"),
    ),
    "<parameter=": replace(_XML, keyed=("<parameter=", ">\n", "\n</parameter>\n")),
}
"""By what their templates have, the forms of families whose arguments are keys and values, which no rendering tells."""


def _loose(text: str) -> str:
    """Return a regular expression of a text with any white space, and with any id."""
    words = [r"[\w.:-]*".join(map(escape, word.split(_ID))) for word in text.split()]
    return r"\s*" + r"\s*".join(words)


@lru_cache(16)
def derived_form(source: str) -> CallForm | Literal[False] | None:
    """Return the form that a chat template writes calls in.

    Returns:
        The form; False where the template writes calls, but no JSON behind a mark; None where it can't be told.
    """
    try:
        template = open_template(source, bos_token="", eos_token="")
        plain = _rendered(template, 0)
    except EdgedecError:
        return None
    for n_calls in (2, 1):  # some templates take a single one
        try:
            text = _rendered(template, n_calls)
        except EdgedecError:
            continue
        return _form_in(text, plain)
    return None


def _rendered(template: ChatTemplate, n_calls: int) -> str:
    """Return what a template writes behind the question: an answer of `n_calls` calls, or one in words for 0."""
    schema = {"type": "object", "properties": {name: {"type": "string", "description": "x"} for name in _ARGUMENTS}}
    tool = {"type": "function", "function": {"name": "zqtool", "description": "x", "parameters": schema}}
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    calls = [{"id": _ID[:-1] + str(i), "type": "function", "function": function} for i in range(n_calls)]
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = [{"role": "user", "content": _ASKED}, answer if calls else {"role": "assistant", "content": _SAID}]
    text = template.render(messages, add_generation_prompt=False, tools=[tool])
    return text.partition(_ASKED)[2][:_MOST_CHARACTERS].replace(_ID[:-1] + "1", _ID)


def _form_in(text: str, plain: str) -> CallForm | Literal[False] | None:
    """Return the form of the calls in what stands behind a question; `plain` is the same of an answer in words.

    What both texts have in common begins and ends an answer. What follows both calls alike closes each of them.
    """
    names = text.split(_NAME)
    if len(names) < 2:
        return None
    parts = [_around_arguments(part) for part in names[1:]]
    if any(part is None for part in parts):
        return False
    (before_arguments, after), (_, last) = parts[0] or ("", ""), parts[-1] or ("", "")
    head, tail = plain.partition(_SAID)[::2]
    before = names[0][len(_shared(names[0], head)) :]
    for family in FAMILIES.values():
        before = before.rpartition(family.closes)[2]
    before = before.lstrip()
    last = last[: len(last) - len(_shared(last[::-1], tail[::-1], backwards=True))]
    mark = BRACKETED.match(before)
    if mark is None or len(set(parts[:-1])) > 1:
        return None
    closes = _shared(after, last) if len(parts) > 1 else last.rstrip()
    again, ends = (after[len(closes) :], last[len(closes) :].rstrip()) if len(parts) > 1 else ("", "")
    ends = ends[: next((mark_at.end() for mark_at in BRACKETED.finditer(ends)), None)]  # more may end the answer
    return CallForm(mark[0], before[mark.end() :], before_arguments, closes, again, ends)


def _around_arguments(text: str) -> tuple[str, str] | None:
    """Return what stands before the arguments in JSON and behind them; None where there are none."""
    for at in (i for i, character in enumerate(text) if character == "{"):
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            continue
        if value == _ARGUMENTS:
            return text[:at], text[end:]
    return None


def _shared(text: str, other: str, *, backwards: bool = False) -> str:
    """Return what both texts begin with, up to a mark that is not in both; `backwards`: both are turned round."""
    n = next(
        (i for i, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), min(len(text), len(other))
    )
    shared = text[:n]
    opening, closing = (">", "<") if backwards else ("<", ">")
    at = shared.rfind(opening)
    return shared[:at] if at > shared.rfind(closing) else shared
