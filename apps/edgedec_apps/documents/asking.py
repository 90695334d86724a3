"""Messages about documents: the documents whole where they fit the context, else what a search finds in them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgedec.api.engine import Engine
from edgedec.chat import Message
from edgedec.decoding.prompt_length import count_tokens, require_may_fit
from edgedec.errors import PromptTooLongError
from edgedec.progress import CancelToken, OnProgress
from edgedec_apps.documents.files import Document
from edgedec_apps.documents.passages import by_words
from edgedec_apps.documents.search import Found, Rank, search, whole

ANSWER = 512
"""Tokens that are kept free for an answer whose length is not given."""
_PART = 4  # of the context's tokens, the part that passages take where their number is not given


@dataclass(frozen=True, slots=True)
class Asking:
    """How a model is asked about documents.

    Attributes:
        content: Makes the content of a message of its text.
        before: The messages before it.
        tools: The tools that the model may call, in OpenAI's form.
        n_answer: Tokens that are kept free for the answer, but at most half of the context.
        with_names: Whether each document that is read whole stands below its name.
        rank: Ranks passages.
        n_passages: The most passages that are read of documents that are searched; None for as many as a quarter of
            the context has room for.
    """

    engine: Engine
    content: Callable[[str], Any] = str
    before: Sequence[Message] = ()
    tools: Sequence[Mapping[str, object]] | None = None
    n_answer: int = ANSWER
    with_names: bool = False
    rank: Rank = by_words
    n_passages: int | None = None

    def about(
        self,
        documents: Sequence[Document],
        question: str | None,
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
    ) -> tuple[str, Found | None]:
        """Return the text of a message about documents, and what was searched for it: None where all is read.

        Raises:
            PromptTooLongError: The documents are too long, and there is no question, or nothing that matches it.
            CancelledError: `cancel` was cancelled.
        """
        engine, text = self.engine, whole(documents, question, with_names=self.with_names)
        try:
            require_may_fit(engine.tokenizer, text, engine.requests.n_prompt_max, engine.card.n_ctx_train)
            engine.chat_ids([*self.before, self._message(text)], tools=self.tools, cancel=cancel)
            return text, None
        except PromptTooLongError as error:
            if question is None or not documents:
                remedy = ". Or ask a question about it: then edgedec searches it" if documents else ""
                raise PromptTooLongError(f"{error.marked}{remedy}") from error
            passages = self.search(documents, question, cancel, on_progress)
            if passages is None:
                raise PromptTooLongError(
                    f"{error.marked}. It was searched, too: no passage with a word of the question fits"
                ) from error
            return passages.content, passages

    def search(
        self,
        documents: Sequence[Document],
        question: str,
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
    ) -> Found | None:
        """Return the passages of documents to read; None where none matches (raises as edgedec_apps search())."""
        engine, most, n_most = self.engine, self.n_passages, self.engine.requests.n_prompt_max
        n_answer = min(self.n_answer, engine.n_ctx // 2)
        n_room = min(n_most - n_answer, engine.n_ctx // _PART)
        if most is None:
            n_most = n_room + count_tokens(engine.tokenizer, question, engine.n_ctx)

        def fits(content: str) -> bool:
            messages, n_tokens = [*self.before, self._message(content)], count_tokens(engine.tokenizer, content, n_most)
            if n_tokens > n_most or engine.template is None:
                return n_tokens <= min(n_most, engine.requests.n_prompt_max - n_answer)
            try:
                return not engine.fit_messages(messages, n_answer, self.tools)[1]
            except PromptTooLongError:
                return False

        def rank(*searched: Any) -> list[int]:
            return self.rank(*searched)[:most]

        return search(documents, question, n_room, fits, rank=rank, cancel=cancel, on_progress=on_progress)

    def _message(self, text: str) -> Message:
        return {"role": "user", "content": self.content(text)}
