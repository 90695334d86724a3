"""The calls of every dialect, whole, a byte at a time and cut at every byte; and dialects learnt from templates."""

import json
import os
import tomllib
from codecs import getincrementaldecoder
from pathlib import Path
from typing import Any

import pytest

from edgedec.chat import open_template
from edgedec.errors import EdgedecError
from edgedec_apps.call_bodies import ToolCall
from edgedec_apps.call_forms import CallForm, derived_form
from edgedec_apps.replies import Parts, ReplyStream, joined, split_reply
from edgedec_apps.reply_marks import MARKS, call_form, marks_of

DIALECTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("dialects.toml").read_text("utf-8"))
DEEP = {"b": [1, -2.5, {"c": None}], "d": True}
ZONE = 'Zürich „]}“ "x" </b>\n{7'
PARAMETERS = {"zone": {"type": "string", "description": "x"}, "deep": {"type": "object", "description": "x"}}
TOOLS: dict[str, dict[str, Any]] = {"look": {"type": "object", "properties": PARAMETERS}, "list": {}}
ARGS = json.dumps({"zone": ZONE, "deep": DEEP}, ensure_ascii=False)
FILLED = {"REPR": repr(ZONE), "ARGS": ARGS, "RAW": ZONE, "DEEP": json.dumps(DEEP)}
Case = tuple[str, str, str, list[dict[str, Any]], str]
LIST = ToolCall("list", "{}")


def texts(dialect: dict[str, Any]) -> dict[str, Case]:
    """Return replies by name: the mark that the prompt opens, the reply, what is thought, the calls, the text."""
    call = dialect["nested"].replace("[ARGS]", "\0")
    for name, value in FILLED.items():
        call = call.replace(name, value)
    call, two = call.replace("\0", "[ARGS]"), dialect["two"]
    first, last = dialect.get("thinks", ("<think>\n", "\n</think>\n\n"))
    before, after = dialect.get("around", ("See: ", " Done."))
    nested: list[dict[str, Any]] = [{"zone": ZONE, "deep": DEEP}]
    both: list[dict[str, Any]] = [{"zone": "UTC"}, {}]
    replies: dict[str, Case] = {
        "nested": ("", call, "", nested, ""),
        "two": ("", two, "", both, ""),
        "behind a thought": ("", f"{first}I „look“.{last}{call}", "I „look“.", nested, ""),
        "two behind a thought": ("", f"{first}I look.{last}{two}", "I look.", both, ""),
        "opened": (first.strip(), f"I look.{last}{call}", "I look.", nested, ""),
    }
    if not dialect.get("plain"):
        text = "See: Done." if "around" not in dialect else "See:\n\nDone."
        replies["among text"] = ("", before + call + after, "", nested, text)
    if not dialect.get("plain") and not dialect.get("apart"):
        replies["in a thought"] = ("", f"{first}So: {two} on.{last}Yes.", "So:\n\non.", both, "Yes.")
    return replies


CASES = [(name, text) for name, dialect in DIALECTS.items() for text in texts(dialect)]


def plain(parts: Parts) -> tuple[str, list[tuple[str, Any]], str]:
    """Return what is thought, the calls with their arguments as values, and the text."""
    return parts.thinking, [(call.name, json.loads(call.arguments)) for call in parts.calls], parts.text


def stream_of(name: str, opened: str) -> ReplyStream:
    """Return what splits a reply in a dialect."""
    return ReplyStream(marks_of(DIALECTS[name]["sign"]), tools=TOOLS, opened=opened)


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_dialect_is_read(name: str, text: str) -> None:
    """Thoughts, calls and text stand apart."""
    opened, reply, thought, calls, said = texts(DIALECTS[name])[text]
    parts = split_reply(reply, marks_of(DIALECTS[name]["sign"]), tools=TOOLS, opened=opened)
    assert plain(parts) == (thought, list(zip(("look", "list"), calls, strict=False)), said)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_dialect_is_read_however_it_is_cut(name: str, text: str) -> None:
    """A byte at a time, and in two pieces cut at every byte, it is the same, and no piece takes back an earlier one.

    Of a reply that ends there, the calls that it holds are among the first of the whole.
    """
    opened, reply = texts(DIALECTS[name])[text][:2]
    whole, by_bytes = split_reply(reply, marks_of(DIALECTS[name]["sign"]), tools=TOOLS, opened=opened), []
    data, decoder, stream = reply.encode(), getincrementaldecoder("utf-8")(), stream_of(name, opened)
    for at in range(len(data)):
        by_bytes.append(stream.feed(decoder.decode(data[at : at + 1])))
        head, halves = data[:at].decode(errors="ignore"), stream_of(name, opened)
        first = halves.feed(head)
        assert joined([first, halves.feed(reply[len(head) :]), halves.finish()]) == whole, head
        for begun, text_of_all in ((first.thinking, whole.thinking), (first.text, whole.text)):
            assert text_of_all.startswith(begun), head
        cut = split_reply(head, marks_of(DIALECTS[name]["sign"]), tools=TOOLS, opened=opened)
        assert list(whole.calls[: len(cut.calls)]) == list(cut.calls), head
    assert joined([*by_bytes, stream.finish()]) == whole


def written(form: CallForm, *calls: ToolCall) -> str:
    """Return calls in a form."""
    bodies = [f"{call.name}{form.before_arguments}{call.arguments}{form.closes}" for call in calls]
    return form.opens + form.before_name + (form.again or form.opens + form.before_name).join(bodies) + form.ends


def template_of(form: CallForm) -> str:
    """Return a chat template of ours that writes calls in a form."""
    first, again = (json.dumps(text) for text in (form.opens + form.before_name, form.again))
    middle, closes, ends = (json.dumps(text) for text in (form.before_arguments, form.closes, form.ends))
    call = f"{{{{ {middle} }}}}{{{{ c.function.arguments | tojson }}}}{{{{ {closes}.replace('call00000', c.id) }}}}"
    return (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        f"{{{{ {first} }}}}{{% for c in m.tool_calls %}}{{{{ c.function.name }}}}{call}"
        f"{{% if not loop.last %}}{{{{ {again} }}}}{{% endif %}}{{% endfor %}}{{{{ {ends} }}}}{{% endif %}}"
        "<|stop|>\n{% endfor %}"
    )


OWN = {mark.form.opens: mark.form for marks in MARKS.values() for mark in marks if mark.form and mark.form.again}
del OWN["functools"]  # is no mark that a template would tell
LEARNT = {
    "an array": CallForm("<tool_calls>", '[{"name": "', '", "arguments": ', "}", ', {"name": "', "]</tool_calls>"),
    "a mark a name": CallForm("<|tools|>", "<|tool|>", "<|args|>", "<|/tool|>", "<|tool|>", "<|/tools|>"),
    "a mark a call": CallForm("<|use|>", " {", "} ", "</use>", "<|use|> {"),
    "names as keys": CallForm("<|prefix|>", '[{"', '": ', "}", ', {"', "]<|suffix|>"),
    "ids": CallForm("[CALLS]", '[{"name": "', '", "arguments": ', ', "id": "call00000"}', ', {"name": "', "]"),
    "lines": CallForm("<calls>", '\n{"name": "', '", "arguments": ', "}\n", '{"name": "', "</calls>"),
}


@pytest.mark.parametrize("name", [*OWN, *LEARNT])
def test_a_dialect_is_learnt_from_a_template(name: str) -> None:
    """The form is that in which the template writes calls; what is written in it is read, and the ids may be others."""
    form = (OWN | LEARNT)[name]
    template = template_of(form)
    assert derived_form(template) == call_form(template) == form
    call = ToolCall("look", ARGS)
    reply = f"Well. {written(form, call, LIST)}".replace("call00000", "x-1")
    assert split_reply(reply, marks_of(template), tools=TOOLS) == Parts("", "Well.", [call, LIST])


def test_what_no_template_tells() -> None:
    """XML is no JSON; without calls in a template the table tells, by what the template or the vocabulary has."""
    xml = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}</tool_call>"
    )
    xml += "{% endfor %}{% endfor %}"
    for template in (xml, "{{ messages[0].content }}<tool_call><function=", "<start_of_turn>", "", "{% broken"):
        assert call_form(template) is None
    assert derived_form(xml) is False
    assert derived_form("{% for m in messages %}{{ m.content }}{% endfor %}") is derived_form("{% broken") is None
    for name in ("harmony", "mistral", "kimi", "tool_call"):
        assert call_form(DIALECTS[{"tool_call": "hermes"}.get(name, name)]["sign"]) in {m.form for m in MARKS[name]}


FOLDER = Path(os.environ.get("EDGEDEC_TEMPLATES", "/nowhere"))


@pytest.mark.long
@pytest.mark.skipif(not FOLDER.is_dir(), reason="EDGEDEC_TEMPLATES names no folder of *.jinja")
def test_others_templates_write_what_is_read() -> None:
    """Of a folder of chat templates, such as llama.cpp has: calls that one writes are read again."""
    calls, read, unread = [("look", json.loads(ARGS))], list[str](), list[str]()
    for path in sorted(FOLDER.glob("*.jinja")):
        source = path.read_text("utf-8")
        shown = rendered(source, 2) or rendered(source, 1)
        if "zone" in shown:
            head, _, tail = rendered(source, 0).partition("Zqsaid.")
            bare = shown.removeprefix(head).removesuffix(tail)
            replies = [split_reply(text, marks_of(source), tools=TOOLS) for text in (shown, bare)]
            (read if any(plain(each)[1] in (calls, calls * 2) for each in replies) else unread).append(path.stem)
    print(f"{len(read)} read, {len(unread)} not: {unread}")
    assert len(read) >= 4 * len(unread)


def rendered(source: str, n_calls: int) -> str:
    """Return what a chat template makes of an answer with calls, behind the question; empty where it fails."""
    functions = [{"name": name, "description": "x", "parameters": TOOLS[name]} for name in TOOLS]
    tools = [{"type": "function", "function": function} for function in functions]
    function = {"name": "look", "arguments": json.loads(ARGS)}
    calls = [{"id": f"call0000{i}", "type": "function", "function": function} for i in range(n_calls)]
    more = {"reasoning_content": "I look.", "tool_calls": calls} if calls else {}
    answer = {"role": "assistant", "content": "" if calls else "Zqsaid."} | more
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Zqasked."}, answer]
    try:
        template = open_template(source, bos_token="", eos_token="")
        return template.render(messages, add_generation_prompt=False, tools=tools).partition("Zqasked.")[2]
    except EdgedecError:
        return ""
