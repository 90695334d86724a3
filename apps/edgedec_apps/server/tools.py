"""Tools: what a chat's model may call, how its template tells it so, and the calls in what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from edgedec.engine import Engine
from edgedec_apps.server.errors import ApiError
from edgedec_apps.server.fields import Fields
from edgedec_apps.tool_calls import Parsed, ToolCallStream, tool_call_schema
from edgedec_runtimes.chat_template import ChatTemplate

_MOST_TOOLS = 128


@dataclass(frozen=True, slots=True)
class Tools:
    """What a model may call.

    Attributes:
        definitions: In OpenAI's form.
        template: Source of the chat template that tells the model of them.
    """

    definitions: tuple[dict[str, Any], ...]
    template: str

    @property
    def names(self) -> frozenset[str]:
        """The names that a call may have."""
        return frozenset(tool["function"]["name"] for tool in self.definitions)


def read_tools(fields: Fields, template: str | None) -> tuple[Tools | None, dict[str, Any]]:
    """Return the tools of a request, and the options of Engine.stream that hold the model to calling one.

    Args:
        fields: The request's; `tools` and `tool_choice` are read.
        template: Source of the model's chat template.

    Raises:
        ApiError: A tool or the choice is malformed, or the template knows nothing of tools.
    """
    definitions = tuple(_definition(i, tool) for i, tool in enumerate(fields.objects("tools")))
    choice = fields.take("tool_choice")
    if len(definitions) > _MOST_TOOLS:
        raise fields.refusal("tools", f"holds {len(definitions)} tools; at most {_MOST_TOOLS}")
    if not definitions:
        if choice not in (None, "none", "auto"):
            raise fields.refusal("tool_choice", "needs tools beside it")
        return None, {}
    if choice == "none":
        return None, {}
    if template is None or "tools" not in template:
        raise fields.refusal("tools", "are unknown to the model's chat template; leave them out, or take another model")
    tools = Tools(definitions, template)
    if choice in (None, "auto"):
        return tools, {}
    return tools, {"json_schema": tool_call_schema(_chosen(fields, choice, tools))}


def _chosen(fields: Fields, choice: Any, tools: Tools) -> Sequence[dict[str, Any]]:
    """Return the tools of which one must be called."""
    if choice == "required":
        return tools.definitions
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    found = [tool for tool in tools.definitions if tool["function"]["name"] == name]
    if not found:
        raise fields.refusal("tool_choice", f"is {choice!r:.100}; it must be none, auto, required, or name a tool")
    return found


def _definition(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form, checked."""
    function = tool.get("function")
    where = f"tools[{i}]"
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ApiError(f"{where} must be an object of type 'function' with a function", param=where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ApiError(f"{where}.function.name must be a string", param=where)
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(f"{where}.function.parameters must be a JSON schema, an object", param=where)
    return {"type": "function", "function": function}


def tool_prompt_ids(engine: Engine, messages: Sequence[dict[str, Any]], tools: Tools) -> list[int]:
    """Return the token ids of a chat with tools, as Engine.chat_ids does without (what ChatTemplate.render raises)."""
    tokenizer = engine.tokenizer
    template = _compiled(tools.template, tokenizer.bos_token, tokenizer.eos_token)
    text = template.render(messages, tools=tools.definitions)
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return tokenizer.encode(text, add_special=not has_bos, parse_special=True)


@lru_cache(maxsize=2)
def _compiled(source: str, bos_token: str, eos_token: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)


class Splitter:
    """Takes the calls out of texts that come in pieces, several at the same time by index.

    `names` are those of the tools; without tools every text is passed on as it is.
    """

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._streams: dict[int, ToolCallStream] = {}
        self._counts: dict[int, int] = {}

    def feed(self, index: int, text: str) -> Parsed:
        """Take a piece; return the text and the calls that are now certain."""
        if self._names is None:
            return text, []
        return self._counted(index, self._stream(index).feed(text))

    def finish(self, index: int) -> Parsed:
        """Return what was held back of a text that is over."""
        if self._names is None:
            return "", []
        return self._counted(index, self._stream(index).finish())

    def count(self, index: int) -> int:
        """Return how many calls a text has had so far."""
        return self._counts.get(index, 0)

    def _stream(self, index: int) -> ToolCallStream:
        return self._streams.setdefault(index, ToolCallStream(self._names))

    def _counted(self, index: int, parsed: Parsed) -> Parsed:
        self._counts[index] = self.count(index) + len(parsed[1])
        return parsed
