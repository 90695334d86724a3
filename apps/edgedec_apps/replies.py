"""The parts of a reply, whole or as it comes: what the model thought, the text, and the calls of tools.

A reply is split by the marks of `edgedec_apps.reply_marks`. A reply that is nothing but JSON is read, too: Llama 3
writes an object with `parameters`, or several with semicolons between, others an object or an array, maybe in a code
fence; Llama 4 and Gemma 3 write a list of calls in Python. What only looks like a call stays text. White space around
calls and thoughts is dropped.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgedec_apps.call_bodies import ToolCall, Tools, call_of, json_values, read_code
from edgedec_apps.call_ends import MOST_HEAD, Finder, OpenCall, finder
from edgedec_apps.reply_marks import MARKS, Mark

USUAL = (*MARKS["think"], *MARKS["tool_call"])
_MOST_BROKEN = 50  # calls and heads
_PYTHON_TAG = "<|python_tag|>"  # Llama 3 begins calls so; where it is a control token it is no text
_FENCE = re.compile(r"```(?:json|python)?\s*\n(.*?)\n?```", re.DOTALL)
_BEGINNING = re.compile(r"\s*(?:<\|python_tag\|>|```(?:json|python)?)?\s*")
_FIRST_CALL = re.compile(r"\[\s*([A-Za-z_][\w.-]*)(\s*\()?")
_FIRST_KEY = re.compile(r'[\s\[]*\{{1,2}\s*"([^"\\]*)"')
_CALL_KEYS = frozenset({"name", "type", "id", "function", "arguments", "parameters"})


@dataclass(frozen=True, slots=True)
class Parts:
    """What a reply consists of, or what a piece adds to it.

    Attributes:
        thinking: What the model thought.
        text: The text of the answer.
        calls: The tools that are to be called.
    """

    thinking: str = ""
    text: str = ""
    calls: Sequence[ToolCall] = ()

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.thinking or self.text or self.calls)


def split_reply(text: str, marks: Iterable[Mark] = USUAL, *, tools: Tools | None = None, opened: str = "") -> Parts:
    """Return the parts of a whole reply; the arguments are those of ReplyStream.

    >>> split_reply("<think>\\nTwo and two.\\n</think>\\n\\nFour.")
    Parts(thinking='Two and two.', text='Four.', calls=[])
    """
    stream = ReplyStream(marks, tools=tools, opened=opened)
    return joined([stream.feed(text), stream.finish()])


def joined(parts: Iterable[Parts]) -> Parts:
    """Return the parts that pieces of a reply add up to."""
    merged = list(parts)
    calls = [call for part in merged for call in part.calls]
    return Parts("".join(part.thinking for part in merged), "".join(part.text for part in merged), calls)


class ReplyStream:
    """Splits a reply that arrives in pieces. What it returns for the pieces adds up to split_reply of the whole reply.

    Text is returned as soon as it can't become part of a mark or a call, and a call when it is complete. A call in the
    midst of a thought counts where it names one of the tools; what follows it is thought again.

    Args:
        marks: The marks that the model may write.
        tools: The tools that may be called; None where calls are text.
        opened: The mark with which the prompt ends, so that the reply begins behind it; empty for none.
    """

    def __init__(self, marks: Iterable[Mark] = USUAL, *, tools: Tools | None = None, opened: str = "") -> None:
        self._marks = [mark for mark in marks if mark.read is None or tools is not None]
        self._tools: Tools = tools or {}
        self._held = ""
        self._begins = True  # nothing but white space came
        self._within: Mark | None = None  # the thought that the reply is in
        self._call: OpenCall | None = None
        self._opening = self._opening_shown = ""  # the mark whose head is to come
        self._n_broken = 0
        self._find: Finder | None = None  # finds the next mark; None where that is to be made anew
        self._plain_close = False  # after a broken call: the first mark that closes a call does so
        self._thought, self._answer = _Thought(), _Answer(tools)
        self._parts: list[Parts] = []
        if any(opened.startswith(mark.opens) for mark in self._marks):
            self.feed(opened)
            self._opening_shown = ""

    @property
    def thinks(self) -> bool:
        """Whether the reply so far ends in what is thought."""
        return self._within is not None

    def feed(self, text: str) -> Parts:
        """Take the next piece; return the parts that are now certain."""
        self._held += text
        while self._step(ended=False):
            pass
        return self._taken()

    def finish(self) -> Parts:
        """Return the rest of the reply, which has ended."""
        while self._step(ended=True):
            pass
        held, self._held = self._held, ""
        self._show(held)
        content, calls = self._answer.finish()
        self._parts.append(Parts("", content, calls))
        return self._taken()

    def _taken(self) -> Parts:
        parts, self._parts = joined(self._parts), []
        return parts

    def _step(self, *, ended: bool) -> bool:
        """Take one mark, or the end of a call, out of the held text; return whether there may be another one."""
        if self._call is not None:
            return self._end_call(self._call, ended=ended)
        if self._opening:
            return self._end_head(ended=ended)
        if self._begins:
            return self._begin(ended=ended)
        find = self._find = self._find or self._marks_here()
        match = find.form.search(self._held)
        if match is None:
            n_held = 0 if ended else max((n_overlap(self._held, text) for text in find.texts), default=0)
            cut = len(self._held) - n_held
            self._show(self._held[:cut])
            self._held = self._held[cut:]
            return False
        self._show(self._held[: match.start()])
        self._held = self._held[match.end() :]
        if self._within is not None and match[0] in self._within.closes:
            self._leave()
        else:
            self._open(match[0], match[0])
        return True

    def _begin(self, *, ended: bool) -> bool:
        """Take a mark that only counts at the beginning of a reply."""
        start = self._held.lstrip()
        texts = [text for mark in self._marks if mark.only_first for text in mark.opens]
        if not ended and any(text.startswith(start) and text != start for text in texts):
            return False
        self._begins = False
        for text in texts:
            if start.startswith(text):
                self._held = start[len(text) :]
                self._open(text, text)
                return True
        return True

    def _open(self, text: str, shown: str) -> None:
        """Enter the part that a mark begins; `shown` is the mark as it stood in the reply."""
        self._begins = False
        mark = next(mark for mark in self._marks if text in mark.opens)
        if mark.head_ends:
            self._opening = text
            self._opening_shown = shown
        else:
            self._enter(mark, shown, "")

    def _end_head(self, *, ended: bool) -> bool:
        """Take the head behind a mark, which tells what the part is."""
        marks = [mark for mark in self._marks if self._opening in mark.opens]
        head_ends = marks[0].head_ends
        head, end, _ = self._held[: MOST_HEAD + len(head_ends)].partition(head_ends)
        if not end and not ended and len(head) < MOST_HEAD + len(head_ends):
            return False
        self._opening = ""
        mark = next((mark for mark in marks if mark.head.search(head)), None)
        if not end or mark is None:
            self._break(self._opening_shown)
            return True
        self._held = self._held[len(head + end) :]
        self._leave()
        self._enter(mark, self._opening_shown + head + end, head)
        return True

    def _enter(self, mark: Mark, shown: str, head: str) -> None:
        if mark.kind == "call":
            aborts = self._within.closes if self._within is not None else ()
            self._call = OpenCall(mark, shown, head, aborts)
        elif mark.kind == "thinking":
            self._thought.begin()
            self._within, self._find = mark, None
        elif mark.read is None:
            self._answer.begin(paragraph=True)

    def _leave(self) -> None:
        if self._within is not None:
            self._within = self._find = None
            self._answer.begin(paragraph=False)

    def _end_call(self, call: OpenCall, *, ended: bool) -> bool:
        """Take the call that is open, where its end is there; a broken one is text."""
        end = call.end(self._held, plain=self._plain_close)
        if end is None and not ended:
            return False
        calls = [] if end is None else self._read(call, end)
        if not calls and not self._plain_close and end != (0, 0):
            self._plain_close = True
            return True
        self._call = None
        if end == (0, 0):
            self._show(call.shown)
            return True
        if not calls and ended:
            end = None
            calls = self._read(call, end)
        if not calls:
            self._break(call.shown)
            return True
        self._held = "" if end is None else self._held[end[1] :]
        if self._within is not None:
            self._thought.begin()
        self._parts.append(Parts("", self._answer.before_call(len(calls)), calls))
        return True

    def _read(self, call: OpenCall, end: tuple[int, int] | None) -> list[ToolCall]:
        """Return the calls up to an end; None stands for the end of the reply."""
        body = self._held if end is None else self._held[: end[0]]
        calls = [] if end == (0, 0) else call.read(body, self._tools, cut=end is None)
        is_known = self._within is None or all(call.name in self._tools for call in calls)
        return calls if is_known else []

    def _break(self, shown: str) -> None:
        """Show the mark of a broken call or head. In a reply with many of these, calls are text from then on."""
        self._show(shown)
        self._n_broken += 1
        if self._n_broken == _MOST_BROKEN:
            self._marks = [mark for mark in self._marks if mark.kind != "call" and not mark.head_ends]
            self._find = None

    def _marks_here(self) -> Finder:
        """Return what finds the next mark."""
        closes = self._within.closes if self._within is not None else ()
        return finder([*closes, *(text for mark in self._marks if not mark.only_first for text in mark.opens)])

    def _show(self, text: str) -> None:
        if self._within is not None:
            self._parts.append(Parts(self._thought.feed(text)))
        else:
            self._parts.append(Parts("", self._answer.feed(text)))


class _Thought:
    """What is thought, without the white space around it; an empty line stands between thoughts."""

    def __init__(self) -> None:
        self._spaces, self._bare, self._gap = "", True, ""
        self._n_shown = 0

    def begin(self) -> None:
        """Begin a thought."""
        self._bare, self._gap = True, "\n\n" if self._n_shown else ""

    def feed(self, text: str) -> str:
        """Return what more of a thought adds."""
        if self._bare:
            text = text.lstrip()
            if not text:
                return ""
            self._bare, self._spaces = False, self._gap
        shown = text.rstrip()
        if not shown:
            self._spaces += text
            return ""
        self._n_shown += 1
        shown, self._spaces = self._spaces + shown, text[len(shown) :]
        return shown


class _Answer:
    """The text of an answer, and the calls of one that is nothing but JSON; `tools` as for ReplyStream."""

    def __init__(self, tools: Tools | None) -> None:
        self._tools = tools
        self._may_be_calls: bool | None = None if tools is not None else False  # None: not known yet
        self._held = ""  # text that may become calls
        self._spaces = ""  # white space, which is dropped before a call or the end
        self._bare, self._gap = False, ""
        self._is_ended = False  # a mark ended the text so far
        self._n_calls = self._n_shown = 0

    def begin(self, *, paragraph: bool) -> None:
        """Begin the text behind a mark, without the white space before it."""
        self._bare = self._is_ended = True
        if paragraph and self._n_shown:
            self._gap, self._spaces = "\n\n", ""

    def feed(self, text: str) -> str:
        """Return what more of the answer adds."""
        if self._bare:
            text = text.lstrip()
            if not text:
                return ""
            text, self._bare, self._gap = self._gap + text, False, ""
        self._is_ended = False
        if self._may_be_calls is False:
            return self._shown(text)
        self._held += text
        if self._may_be_calls is None:
            self._may_be_calls = _may_be_calls(self._held, self._tools or {})
        if self._may_be_calls is not False:
            return ""
        held, self._held = self._held, ""
        return self._shown(held)

    def before_call(self, n_calls: int) -> str:
        """Return the text that was held back before calls."""
        text = self._shown(self._held)
        self._held, self._spaces, self._may_be_calls = "", "", False
        self._n_calls += n_calls
        return text

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest, and the calls that the whole answer consists of."""
        calls = _plain_calls(self._held, self._tools or {}) if self._may_be_calls is not False else []
        if calls:
            return "", calls
        text = self._shown(self._held)
        return text if self._n_calls or self._is_ended else text + self._spaces, []

    def _shown(self, text: str) -> str:
        """Return a text with the white space that was held back before it; hold back the white space at its end."""
        bare = text.rstrip() if self._tools is not None else text
        if not bare:
            self._spaces += text
            return ""
        self._n_shown += 1
        shown, self._spaces = self._spaces + bare, text[len(bare) :]
        return shown


def _may_be_calls(text: str, tools: Tools) -> bool | None:
    """Return whether a reply that begins like this may consist of calls only; None where that is not known."""
    text = text.lstrip()
    if any(start.startswith(text) for start in (_PYTHON_TAG, "```json", "```python")):
        return None
    text = _BEGINNING.sub("", text, count=1)
    if text and text[0] not in "{[":
        return False
    call = _FIRST_CALL.match(text)
    if call is not None and (call[2] or call.end() < len(text)):
        return call[2] is not None and call[1] in tools
    first = _FIRST_KEY.match(text)
    return None if first is None else first[1] in _CALL_KEYS


def _plain_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Return the calls of known tools that a reply consists of; an empty list where it has anything else."""
    text = text.strip().removeprefix(_PYTHON_TAG).strip()
    fenced = _FENCE.fullmatch(text)
    text = fenced[1] if fenced else text
    if _FIRST_CALL.match(text.lstrip()):
        return read_code("", text, tools)
    values = json_values(text)
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    calls = [call_of(value, needs_arguments=True) for value in values]
    offered = [call for call in calls if call is not None and call.name in tools]
    return offered if len(offered) == len(values) else []


def n_overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `tag`, but not all of it.

    >>> n_overlap("so far </th", "</think>")
    4
    """
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
