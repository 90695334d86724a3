"""A loaded model with its sessions: what it is, prompts for it, and forwards of one's own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from edgedec.api.open_model import OpenModel
from edgedec.api.requests import (
    ChatPrompts,
    Prompt,
    SamplingOptions,
)
from edgedec.callers import checks_methods
from edgedec.chat import Chat, Message, messages_of
from edgedec.control_tokens import SaidTemplate
from edgedec.errors import OptionError, RequestError, TemplateError, argument
from edgedec.pictures import Pictures, has_pictures
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sessions.text_pages import MOST_FORKS

if TYPE_CHECKING:  # what few texts need is imported when it is asked for
    from edgedec.choosing.partial_texts import PartialTexts
    from edgedec.decoding.branches import Branches


@checks_methods
class LoadedModel(OpenModel):
    """A loaded model with its sessions, for forwards and searches of one's own; Engine writes texts with it.

    Several threads may use it. As many requests as it was loaded for (n_parallel) are generated at the same time and
    share forwards; further ones wait for their turn.
    """

    def sampling(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return sampling parameters: the options given, then the model's own defaults, then edgedec's.

        Raises:
            RequestError: An option is unknown or out of range.
        """
        return self.requests.sampling(options)

    def prompt_ids(self, prompt: Prompt, *, as_said: bool = False, continued: bool = True) -> tuple[int, ...]:
        """Return a prompt's token ids.

        Args:
            prompt: A text or token ids.
            as_said: Whether control tokens that the text spells stay text, as in a user's or a document's words.
            continued: Whether a text is written behind it, which needs room; one to embed may fill the context.

        Raises:
            PromptTooLongError: The prompt is a text that does not fit the context.
            RequestError: The prompt is neither a text nor a sequence of whole numbers.
        """
        return self.requests.prompt_ids(prompt, as_said=as_said, continued=continued)

    def cut_ids(self, text: str) -> tuple[int, ...]:
        """Return a text's token ids, cut to what fits the context; a token that ends every text stays the last one."""
        return self.requests.cut_ids(text)

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def template(self) -> SaidTemplate:
        """The model's chat template (TemplateError where it has none); one that does not compile refuses chats."""
        return self._chats().template

    def chat_ids(
        self,
        messages: Chat,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt that the chat template makes of `messages`, and of tools in OpenAI's form, as token ids.

        Args:
            messages: What the user says, or the chat, oldest message first.
            tools: The functions that the model may call.
            cancel: Ends the rendering.
            variables: Further variables of the model's template, such as {"enable_thinking": False}.

        Raises:
            CancelledError: `cancel` ended the rendering.
            TemplateError: The model has no chat template, or the template fails.
            PromptTooLongError: The conversation does not fit the context.
        """
        marked, pictures = self.mark_pictures(messages)
        return self.rendered_ids(self.render(marked, tools=tools, cancel=cancel, variables=variables), pictures)

    def render(
        self,
        messages: Chat,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the chat template makes of `messages` as text (raises what chat_ids raises).

        Where messages spell control tokens, it holds edgedec.control_tokens.MARK, which keeps them text.
        """
        return self._chats().render(messages_of(messages), tools, cancel, variables)

    def rendered_ids(self, text: str, pictures: Sequence[Any] = ()) -> list[int]:
        """Return the token ids of a prompt of render() (PromptTooLongError where they don't fit the context).

        Where the prompt has marks of mark_pictures(), `pictures` are that function's; their rows have negative ids.
        """
        return self._chats().ids(text, pictures)

    @property
    def reads_pictures(self) -> bool:
        """Whether messages may have pictures: a projector was loaded with the model."""
        return self._pictures is not None

    def mark_pictures(self, messages: Chat) -> tuple[Sequence[Message], tuple[Any, ...]]:
        """Return messages for render(), with a mark in place of each picture, and the pictures, before any is decoded.

        Raises:
            RequestError: The model reads no pictures, or a picture is damaged or beyond the limits.
        """
        messages = messages_of(messages)
        if not has_pictures(messages):
            return messages, ()
        if self._pictures is None:
            why = "no mmproj*.gguf lies beside it; put it there"
            if "pictures left out" in self.plan.given_up:
                why = "the memory plan left pictures out; allow more"
            remedy = f"or name it ({argument('projector')})"
            raise RequestError(f"the model {self.card.name!r} reads no pictures: {why}, {remedy}")
        self.model.capabilities.require("vector_rows", self.card.runtime)
        return self._pictures.mark(messages)

    def picture_rows(
        self, pictures: Sequence[Any], *, cancel: CancelToken | None = None, on_progress: OnProgress | None = None
    ) -> Pictures:
        """Return the rows of the pictures of mark_pictures(), for stream(..., pictures=...).

        Raises:
            RequestError, CancelledError, RuntimeLostError: A picture is damaged; or its decoder was lost, which is
                started again by the next call.
        """
        return {} if self._pictures is None or not pictures else self._pictures.rows(pictures, cancel, on_progress)

    def fit_messages(
        self, messages: Chat, n_reserved: int, tools: Sequence[Mapping[str, object]] | None = None
    ) -> tuple[list[Message], int]:
        """Return the messages without the oldest turns, so that `n_reserved` tokens are free for the answer.

        Also return how many messages are left out. `tools`, in OpenAI's form, are part of the prompt.
        """
        if n_reserved < 0:
            raise OptionError("n_reserved", n_reserved, "it must be from 0")
        messages = messages_of(messages)
        marked, pictures = self.mark_pictures(messages)
        kept, n_left_out = self._chats().fit(marked, self.n_ctx - 1 - n_reserved, tools, pictures)
        given = {id(mark): message for mark, message in zip(marked, messages, strict=True)}
        return [given[id(mark)] for mark in kept], n_left_out

    def _chats(self) -> ChatPrompts:
        self.requests.require_writer()
        if self._template is None:
            raise TemplateError(
                f"the model {self.card.name!r} has no chat template: it continues text rather than answers; "
                f"use generate() (--raw), or load it with {argument('chat_template')}"
            )
        return ChatPrompts(self._template, self.tokenizer, self.n_prompt_max, self.card.n_ctx_train, self._pictures)

    def branches(
        self,
        prompt: Prompt,
        *,
        most: int = MOST_FORKS,
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
    ) -> "AbstractContextManager[Branches]":
        """Open branches of a prompt inside the block, for decoding of one's own; see edgedec.decoding.branches.

        The block waits for its turn as a request does. The model's other requests share forwards with it where the
        model was loaded for several at a time. Close the model after the block.

        Args:
            prompt: The text or the token ids to go on from.
            most: Most branches at a time.
            cancel: Stops the forward that is running, from any thread; the forward then raises CancelledError.
            on_progress: Called while the prompt is read.

        Raises:
            CapabilityError: The runtime can't fork sessions, or a row depends there on what else is in its forward.
            RequestError: The prompt is empty, or `most` is out of range.
            PromptTooLongError, ContextFullError: The prompt does not fit the context.
            CancelledError: `cancel` was cancelled before the prompt was read.
        """
        from edgedec.decoding.branches import branches_on

        request, stop = self.requests.plain(prompt, {}), cancel or CancelToken()
        return branches_on(self.pool, request, stop, most=most, on_progress=on_progress)

    @contextmanager
    def partial_texts(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 512,
        stop: Sequence[str] = (),
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
    ) -> "Iterator[PartialTexts]":
        """Read a prompt, and hold its texts inside the block for a search: edgedec.choosing has the searches.

            with model.partial_texts(model.chat_ids(messages), max_tokens=200) as texts:
                best = beam_search(texts, 4)[0]
                print(texts.text(best.text))

        Args:
            prompt: The text or the token ids to go on from; chat_ids() makes them of messages.
            max_tokens: Most tokens of a text; fewer where the context is full before.
            stop: Strings, each of which ends a text.
            cancel: Ends the search with CancelledError, from any thread.
            on_progress: Called while the prompt is read.

        Raises:
            RequestError: `max_tokens` or `stop` is out of range.
            What branches() raises.
        """
        from edgedec.choosing.partial_texts import PartialTexts

        ids, _ = self.prompt_ids(prompt), SamplingParams(max_tokens=max_tokens, stop=tuple(stop))  # which checks these
        with self.branches(ids, cancel=cancel, on_progress=on_progress) as branches:
            room = max(1, min(max_tokens, branches.n_ctx - len(ids)))
            is_end, decode = self.tokenizer.is_end, self.tokenizer.decode
            with PartialTexts(
                branches, ids, is_end=is_end, decode=decode, max_tokens=room, stop=stop, cancel=cancel
            ) as texts:
                yield texts
