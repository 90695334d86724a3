"""The fields of messages under the names that a chat template reads, where those differ from the usual ones."""

import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_THINKING = re.compile(r"""\.thinking\b|\[\s*['"]thinking['"]\s*\]""")


def with_field_names(messages: Sequence[Message], source: str) -> list[Message]:
    """Return the messages of a chat as the template `source` reads them.

    The templates of gpt-oss and LFM2.5 read what was thought as `thinking`. Earlier ones of Gemma 4 read the answers of
    tools as `tool_responses` of the message that calls the tools.
    """
    found = [dict(message) for message in messages]
    if _THINKING.search(source) and "reasoning_content" not in source:
        found = [_with_thinking(message, source) for message in found]
    return _with_tool_responses(found) if "tool_responses" in source else found


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
    found: list[Message] = []
    for message in messages:
        calls = found[-1].get("tool_calls") if found else None
        if message["role"] != "tool" or not calls:
            found.append(message)
            continue
        caller = found[-1]
        responses = caller.setdefault("tool_responses", [])
        named = {call.get("id"): call["function"]["name"] for call in calls if isinstance(call.get("function"), dict)}
        by_place = list(named.values())[len(responses) :]
        name = named.get(message.get("tool_call_id")) or message.get("name") or message.get("tool_name")
        responses.append({"name": name or (by_place or ["unknown"])[0], "response": message.get("content")})
    return found


def with_text_calls_told(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a template that takes only objects as arguments of calls.

    A call whose arguments are a text, as a model wrote them when they are no JSON, stands in the content.
    """
    found: list[Message] = []
    for message in messages:
        calls = [call for call in message.get("tool_calls") or [] if isinstance(call, dict)]
        functions = [call["function"] for call in calls if isinstance(call.get("function"), dict)]
        broken = [each for each in functions if isinstance(each.get("arguments"), str)]
        if broken:
            told = [f"{function.get('name')} {function['arguments']}" for function in broken]
            content = message.get("content") or ""
            if isinstance(content, str):
                content = "\n".join(filter(None, [content, *told]))
            else:
                content = [*content, *({"type": "text", "text": text} for text in told)]
            kept = [call for call in calls if call.get("function") not in broken]
            message = {**message, "content": content, "tool_calls": kept}
        found.append(message)
    return found
