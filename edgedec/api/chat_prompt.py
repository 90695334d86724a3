"""From the messages of a chat to the tokens of a prompt: the chat template, then the tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgedec.chat import ChatTemplate, Message, drop_oldest_turns
from edgedec.decoding.prompt_length import count_tokens, encode_prompt, require_messages
from edgedec.progress import CancelToken
from edgedec.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatPrompts:
    """Makes prompts from a model's chats.

    Attributes:
        template: The model's chat template.
        tokenizer: The model's tokenizer.
        n_most: Most tokens of a prompt.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    n_most: int

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a chat, and of tools in OpenAI's form, as text; `variables` are of the template.

        Raises:
            PromptTooLongError: The chat has too many messages.
            TemplateError: The template fails.
            CancelledError: `cancel` ended the rendering.
        """
        require_messages(len(messages), self.n_most)
        return self.template.render(
            messages, add_generation_prompt=True, tools=tools, cancel=cancel, **(variables or {})
        )

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt (PromptTooLongError where they are more than `self.n_most`)."""
        add_special = not self._has_bos(text)
        return encode_prompt(self.tokenizer, text, self.n_most, add_special=add_special, parse_special=True)

    def fit(self, messages: Sequence[Message], n_most: int) -> tuple[list[Message], int]:
        """Return the messages without the oldest turns, so that the prompt has at most `n_most` tokens.

        Also return how many messages are left out.
        """

        def count(kept: Sequence[Message]) -> int:
            text = self.template.render(kept, add_generation_prompt=True)
            return count_tokens(self.tokenizer, text, n_most, add_special=not self._has_bos(text), parse_special=True)

        return drop_oldest_turns(messages, count, n_most)

    def _has_bos(self, text: str) -> bool:
        bos = self.tokenizer.bos_token
        return bool(bos) and text.startswith(bos)
