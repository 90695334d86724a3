"""Chat templates: the Jinja source that comes with a model makes one prompt of the messages of a chat.

The source is downloaded with the model and is not trusted. It runs in a sandbox (edgedec_runtimes.chat.sandbox) on a
budget of memory, steps and time, and renders what Hugging Face's apply_chat_template renders.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from traceback import walk_tb
from typing import Any

import jinja2

from edgedec.callers import did_you_mean
from edgedec.chat import plain_tool
from edgedec.errors import CancelledError, RequestError, TemplateError, argument
from edgedec.progress import CancelToken
from edgedec_runtimes.chat.sandbox import Sandbox

MAX_REASON_CHARS = 300

_ROLES = ("system", "user", "assistant", "tool", "developer", "function")
_PROBE = "edgedec-probe"
_TAKES_KINDS = "type"  # a template without the word does not look at the kinds of parts


class ChatTemplate:
    """A model's chat template, compiled once. Any thread may use it."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        """Compile the template (TemplateError, with the line, where it is not valid)."""
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._takes_parts: bool | None = None
        self._takes_strings: bool | None = None
        try:
            self._code = Sandbox().guarded_code(source)
        except Exception as error:  # Jinja's, and Python's own for code nested too deep
            raise _template_error(
                error, error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else None
            ) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads."""
        return Sandbox().names_read(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cancel: CancelToken | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a chat, with special tokens spelled out.

        Args:
            messages: Each has a "role" and a "content": a string, or parts {"type": "text", "text": ...}, which are
                joined by line breaks unless the template takes parts. A string becomes a part where the template takes
                nothing else. An assistant message with "tool_calls" needs no content.
            add_generation_prompt: Whether the prompt ends with the beginning of an assistant message.
            tools: Descriptions of tools, for templates that know them.
            cancel: Ends the rendering, from any thread.
            variables: Further variables of this model's template (`enable_thinking`, ...), plain data.

        Raises:
            CancelledError: `cancel` was cancelled.
            RequestError: There is no message, or one is malformed.
            TemplateError: The template refuses the messages, fails, or uses more than a rendering may.
        """
        checked = check_messages(messages)
        self._require_roles(checked)
        if tools is not None:
            _check_mappings(tools, "tool")
            tools = [plain_tool(tool) for tool in tools]
        if any(isinstance(message.get("content"), list) for message in checked) and not self._parts_are_taken(cancel):
            checked = [_joined(message) for message in checked]
        if _TAKES_KINDS in self.source and not self._strings_are_taken(cancel) and self._parts_are_taken(cancel):
            checked = [_in_parts(message) for message in checked]
        checked = with_field_names(checked, self.source)
        fixed_variables = {"documents": None, "tools": tools, "add_generation_prompt": add_generation_prompt}
        chat = {**self._tokens, **fixed_variables, **variables, "messages": checked}
        try:
            return self._run(chat, cancel)
        except TemplateError:
            plainer = {
                "messages": with_text_calls_told(checked),
                "tools": None if tools is None else [plain_tool(tool, complete=True) for tool in tools],
            }
            if plainer == {name: chat[name] for name in plainer}:
                raise
            return self._run(chat | plainer, cancel)

    def _require_roles(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise RequestError for a role that clients do not send and that the template does not name."""
        for i, role in enumerate(message["role"] for message in messages):
            if role not in _ROLES and not any(f"{mark}{role}{mark}" in self.source for mark in "'\""):
                hint = did_you_mean(role, _ROLES) or f"; it must be one of {', '.join(_ROLES)}"
                raise RequestError(f"message {i}: 'role' is {role!r:.100}{hint}")

    def _run(self, variables: Mapping[str, Any], cancel: CancelToken | None) -> str:
        try:
            return Sandbox(cancel).render(self._code, variables)
        except CancelledError:
            raise
        except Exception as error:  # a hostile template may cause any, MemoryError and RecursionError included
            raise _template_error(error, _failing_line(error)) from error

    def _parts_are_taken(self, cancel: CancelToken | None) -> bool:
        """Return whether the template renders a content of parts as its text; found out once."""
        if self._takes_parts is None:
            parts = [{"type": "text", "text": _PROBE}]
            try:
                text = self._run({**self._tokens, "messages": [{"role": "user", "content": parts}]}, cancel)
            except TemplateError:
                text = ""
            self._takes_parts = _PROBE in text and repr(parts) not in text and json.dumps(parts) not in text
        return self._takes_parts

    def _strings_are_taken(self, cancel: CancelToken | None) -> bool:
        """Return whether the template renders a content that is a string; found out once."""
        if self._takes_strings is None:
            try:
                text = self._run({**self._tokens, "messages": [{"role": "user", "content": _PROBE}]}, cancel)
            except TemplateError:
                text = _PROBE  # what it wants instead is not known
            self._takes_strings = _PROBE in text
        return self._takes_strings


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as dicts (RequestError, with the index, where one is malformed)."""
    _check_mappings(messages, "message")
    if not messages:
        raise RequestError(f"{argument('messages')} is empty; a chat needs at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"message {i}: 'role' must be a string, not {message.get('role')!r:.100}")
        _check_content(i, message)
    return [dict(message) for message in messages]


def _check_mappings(items: Sequence[Mapping[str, Any]], what: str) -> None:
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise RequestError(f"{what}s must be a sequence of mappings, not {type(items).__name__}")
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise RequestError(f"{what} {i} must be a mapping, not {type(item).__name__}")


def _check_content(i: int, message: Mapping[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list):
        raise RequestError(f"message {i}: 'content' must be a string or a list of text parts, not {content!r:.100}")
    for j, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"message {i}: part {j} of 'content' must be a text part, not {part!r:.100}")


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _failing_line(error: Exception) -> int | None:
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else None


def _template_error(error: Exception, line: int | None) -> TemplateError:
    where = "chat template" if line is None else f"chat template, line {line}"
    reason = (error.message if isinstance(error, jinja2.TemplateError) else str(error)) or type(error).__name__
    return TemplateError(f"{where}: {reason[:MAX_REASON_CHARS]}")


Message = dict[str, Any]

_THINKING = re.compile(r"""\.thinking\b|\[\s*['"]thinking['"]\s*\]""")


def with_field_names(messages: Sequence[Message], source: str) -> list[Message]:
    """Return the messages of a chat as the template `source` reads them.

    The templates of gpt-oss and LFM2.5 read what was thought as `thinking`. Earlier ones of Gemma 4 read the answers of
    tools as `tool_responses` of the message that calls the tools.
    """
    copies = [dict(message) for message in messages]
    if _THINKING.search(source) and "reasoning_content" not in source:
        copies = [_with_thinking(message, source) for message in copies]
    return _with_tool_responses(copies) if "tool_responses" in source else copies


def _with_thinking(message: Message, source: str) -> Message:
    thought = message.get("reasoning_content")
    if not thought or "thinking" in message:
        return message
    content = message.get("content")
    if "<|channel|>" in source and message.get("tool_calls") and isinstance(content, str) and content:
        # gpt-oss's template takes only one of the two beside a call.
        return message | {"thinking": f"{thought}\n\n{content}", "content": ""}
    return message | {"thinking": thought}


def _with_tool_responses(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        calls = merged[-1].get("tool_calls") if merged else None
        if message["role"] != "tool" or not calls:
            merged.append(message)
            continue
        caller = merged[-1]
        responses = caller.setdefault("tool_responses", [])
        function_names = {
            call.get("id"): call["function"]["name"] for call in calls if isinstance(call.get("function"), dict)
        }
        by_place = list(function_names.values())[len(responses) :]
        name = function_names.get(message.get("tool_call_id")) or message.get("name") or message.get("tool_name")
        responses.append({"name": name or (by_place or ["unknown"])[0], "response": message.get("content")})
    return merged


def with_text_calls_told(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a template that takes only objects as arguments of calls.

    A call whose arguments are a text, as a model wrote them when they are no JSON, stands in the content.
    """
    merged: list[Message] = []
    for message in messages:
        calls = [call for call in message.get("tool_calls") or [] if isinstance(call, dict)]
        functions = [call["function"] for call in calls if isinstance(call.get("function"), dict)]
        broken = [each for each in functions if isinstance(each.get("arguments"), str)]
        if broken:
            lines = [f"{function.get('name')} {function['arguments']}" for function in broken]
            content = message.get("content") or ""
            if isinstance(content, str):
                content = "\n".join(filter(None, [content, *lines]))
            else:
                content = [*content, *({"type": "text", "text": text} for text in lines)]
            sound = [call for call in calls if call.get("function") not in broken]
            message = {**message, "content": content, "tool_calls": sound}
        merged.append(message)
    return merged
