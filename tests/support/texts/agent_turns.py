"""A made conversation of a coding agent: tools, their results, and Claude Code's line for bills, another each time."""

import argparse
import inspect
from collections.abc import Sequence
from typing import Any

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template by which each prompt begins with the one before."""
N_TURNS = 10
ANSWER = "I read this file."
N_RESULT = 100
_TEXT = inspect.getsource(argparse)
_PATH = {"type": "object", "properties": {"path": {"type": "string", "description": "The file."}}, "required": ["path"]}
_TOOLS = [{"name": f"{verb}_file", "description": verb, "input_schema": _PATH} for verb in ("read", "edit")]


def request(answers: Sequence[str], n_system: int, n_result: int = N_RESULT) -> dict[str, Any]:
    """Return the body of the next request to /v1/messages.

    Args:
        answers: What the model said in the turns before; after each, it called a tool.
        n_system: Characters of the system message, not counting the line for bills.
        n_result: Characters of each tool's result.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find what is wrong, and mend it."}]
    for i, answer in enumerate(answers):
        call = {"type": "tool_use", "id": f"call_{i}", "name": "read_file", "input": {"path": f"{i}.py"}}
        result = _TEXT[n_system + i * n_result :][:n_result]
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}, call]})
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"call_{i}", "content": result}]}
        )
    bill = f"x-anthropic-billing-header: cc_version=2.1; cch={7919 * len(answers) % 1048576:05x};"
    system = [{"type": "text", "text": bill}, {"type": "text", "text": _TEXT[:n_system]}]
    return {"model": "m", "max_tokens": 16, "temperature": 0, "tools": _TOOLS, "messages": messages, "system": system}
