"""Chats: messages to a prompt by the model's own template, and what to leave out when they no longer fit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from edgedec.counted import counted
from edgedec.errors import PromptTooLongError
from edgedec.progress import CancelToken

Message = Mapping[str, Any]


class ChatTemplate(Protocol):
    """Renders messages to the text a model was trained on. Made by a factory (`edgedec.templates`)."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cancel: CancelToken | None = None,
    ) -> str:
        """Return the prompt text; `tools` are what the model may call, in OpenAI's form; `cancel` ends the rendering.

        Raises:
            CancelledError: It was cancelled.
            TemplateError: The template fails, runs without end or reaches outside its sandbox.
            RequestError: A message or a tool is malformed.
        """


class ChatTemplateFactory(Protocol):
    """What an entry point of `edgedec.templates` names."""

    def __call__(self, source: str, *, bos_token: str, eos_token: str) -> ChatTemplate: ...


def drop_oldest_turns(
    messages: Sequence[Message], n_tokens: Callable[[Sequence[Message]], int], n_max: int
) -> tuple[list[Message], int]:
    """Leave out the oldest turns until the chat fits in `n_max` tokens.

    System messages stay, and so does the last message; what is left begins with a user's message.

    Returns:
        The messages left, and how many were left out.

    Raises:
        PromptTooLongError: The last message alone does not fit.

    >>> chat = [{"role": r, "content": r} for r in ("system", "user", "assistant", "user")]
    >>> drop_oldest_turns(chat, len, 3)
    ([{'role': 'system', 'content': 'system'}, {'role': 'user', 'content': 'user'}], 2)
    """
    kept = list(messages)
    while (n := n_tokens(kept)) > n_max:
        droppable = [i for i, message in enumerate(kept[:-1]) if message.get("role") != "system"]
        if not droppable:
            raise PromptTooLongError(
                f"the last message takes at least {counted(n, 'token')} where the context leaves room for {n_max}; "
                f"shorten it, or load the model with a longer context"
            )
        start = droppable[0]
        del kept[start]
        while start < len(kept) - 1 and kept[start].get("role") not in ("user", "system"):
            del kept[start]
    return kept, len(messages) - len(kept)
