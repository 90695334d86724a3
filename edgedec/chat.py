"""Chats: the contract of a chat template, and which messages to leave out when a chat no longer fits the context."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from edgedec import plugins
from edgedec.errors import OptionError, PromptTooLongError, RequestError, counted
from edgedec.progress import CancelToken
from edgedec.thought_marks import thoughts_family

Message = Mapping[str, Any]
Chat = str | Sequence[Message]
"""The messages of a chat, the oldest first; a text is one message of the user."""

_SWITCHES = ("enable_thinking", "thinking")


_VALUES = ("enum", "const", "default", "examples")  # of a JSON schema: what stands in them is no schema
_DEEPEST = 32  # levels of a schema that are looked at
_OF_NO_ARGUMENTS = {
    "type",
    "title",
    "description",
    "$schema",
    "$defs",
    "additionalProperties",
    "properties",
    "required",
}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def plain_schema(schema: Any, depth: int = 0) -> Any:
    """Return a JSON schema with no properties, and nothing required, in the place of nulls.

    >>> plain_schema({"type": "object", "properties": None, "required": None})
    {'type': 'object', 'properties': {}}
    """
    if depth < _DEEPEST and isinstance(schema, list):
        return [plain_schema(each, depth + 1) for each in schema]
    if depth == _DEEPEST or not isinstance(schema, Mapping):
        return schema
    filled = {**schema, "properties": {}} if schema.get("properties", "") is None else schema
    fields = {name: value for name, value in filled.items() if name != "required" or value is not None}
    return {name: value if name in _VALUES else plain_schema(value, depth + 1) for name, value in fields.items()}


def plain_tool(tool: Mapping[str, Any], *, complete: bool = False) -> dict[str, Any]:
    """Return a tool in OpenAI's form without nulls in its parameters; with `complete`, none that are left out."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    filled = {"parameters": {"type": "object", "properties": {}} | (function.get("parameters") or {})}
    fields = {**function, **(filled if complete else {})}.items()
    plain = {name: plain_schema(value) if name == "parameters" else value for name, value in fields}
    return {**tool, "function": {name: value for name, value in plain.items() if (name, value) != ("parameters", None)}}


def arguments_schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON schema of the arguments of a call of a function; that of {} where it has no parameters."""
    parameters: Mapping[str, Any] = plain_schema(function.get("parameters") or {})
    takes_some = any(parameters.get(name) for name in ("properties", "required", "additionalProperties"))
    is_plain = parameters.keys() <= _OF_NO_ARGUMENTS and parameters.get("type", "object") == "object"
    return NO_ARGUMENTS if is_plain and not takes_some else parameters


def messages_of(chat: Chat) -> Sequence[Message]:
    """Return the messages of a chat.

    >>> messages_of("Hello")
    [{'role': 'user', 'content': 'Hello'}]
    """
    return [{"role": "user", "content": chat}] if isinstance(chat, str) else chat


class ChatTemplate(Protocol):
    """Renders messages to the form of prompt that a model was trained on; open_template makes it."""

    @property
    def source(self) -> str:
        """The text of the template."""

    @property
    def variables(self) -> Collection[str]:
        """The names that the template reads, its own and those of the arguments of render."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cancel: CancelToken | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of the prompt.

        Args:
            messages: The chat, oldest message first.
            add_generation_prompt: Whether the prompt ends with the beginning of the assistant's next message.
            tools: The functions that the model may call, in OpenAI's form; None for no tools.
            cancel: Ends the rendering.
            variables: Further variables of this template (`enable_thinking`, ...), plain data.

        Raises:
            CancelledError: The rendering was cancelled.
            TemplateError: The template fails, runs without end or reaches outside its sandbox.
            RequestError: A message or a tool is malformed.
        """


def open_template(source: str, *, bos_token: str, eos_token: str) -> ChatTemplate:
    """Return the template of a model, made by another package's plug-in where one takes it.

    Args:
        source: The template's text.
        bos_token: The text of the token that begins a text, which the template may insert.
        eos_token: The text of the token that ends one.

    Raises:
        TemplateError: The template does not compile.
    """
    template: ChatTemplate = plugins.first_made(plugins.TEMPLATES, source, bos_token=bos_token, eos_token=eos_token)
    return template


def may_think(source: str) -> bool:
    """Return whether the model of a chat template may think before it answers: whether it has a mark for thoughts."""
    return thoughts_family(source) is not None


def thinking_variables(template: ChatTemplate, think: bool | int | None) -> dict[str, bool]:
    """Return the variables with which a template makes the model think before it answers, or answer at once.

    Args:
        template: The model's chat template.
        think: True, False, or for how many tokens; None for what the template does by itself, which needs no variable.

    Raises:
        RequestError: The template can't do this: it has no variable for it, and does not do it by itself. Thoughts of
            no tokens need no variable.
    """
    if think is not None and think < 0:
        raise OptionError("think", think, "it must be True, False, or a number of tokens, at least 0")
    variables = {name: bool(think) for name in _SWITCHES if name in template.variables} if think is not None else {}
    if think is not None and not variables and bool(think) != may_think(template.source) and (think or think is False):
        does = "always thinks" if think is False else "never thinks"
        raise RequestError(
            f"think is {think}, but by its chat template the model {does}; the template has no variable "
            f"({' or '.join(_SWITCHES)}) to change that: leave the option out"
        )
    return variables


def drop_oldest_turns(
    messages: Sequence[Message], n_tokens: Callable[[Sequence[Message]], int], n_max: int
) -> tuple[list[Message], int]:
    """Leave out the oldest turns until the chat fits in `n_max` tokens.

    System messages and the last message stay. Behind the system messages, the chat then begins with a user's message.

    Args:
        messages: The chat, oldest message first.
        n_tokens: Returns how many tokens the prompt of some messages has.
        n_max: Most tokens of the prompt.

    Returns:
        The messages that stay, and how many were left out.

    Raises:
        PromptTooLongError: The last message with the system messages does not fit.

    >>> chat = [{"role": r, "content": r} for r in ("system", "user", "assistant", "user")]
    >>> drop_oldest_turns(chat, len, 3)
    ([{'role': 'system', 'content': 'system'}, {'role': 'user', 'content': 'user'}], 2)
    """
    remaining = list(messages)
    while (n := n_tokens(remaining)) > n_max:
        droppable = [i for i, message in enumerate(remaining[:-1]) if message.get("role") != "system"]
        if not droppable:
            raise PromptTooLongError(
                f"the last message takes at least {counted(n, 'token')}, but the context has room for {n_max}; "
                "shorten it, or load the model with a longer context"
            )
        start = droppable[0]
        del remaining[start]
        while start < len(remaining) - 1 and remaining[start].get("role") not in ("user", "system"):
            del remaining[start]
    return remaining, len(messages) - len(remaining)
