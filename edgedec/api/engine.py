"""The engine that an application holds: a loaded model that generates, streams and chats."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from edgedec.api import async_api as aio
from edgedec.api.chat_prompt import ChatPrompts
from edgedec.api.embedding import Embedder
from edgedec.api.prompt_cache import cache_of, read_prompt_cache, restore_cache, write_prompt_cache
from edgedec.api.request_options import Prompt, RequestOptions, SamplingOptions, as_token_ids, require_rule
from edgedec.chat import ChatTemplate, Message, thinking_variables
from edgedec.cost_curve import CostCurve
from edgedec.decoding.embedding import require_dimensions, require_pooling
from edgedec.decoding.generate import SessionSlot, TokenStream
from edgedec.decoding.infill import Gap, gap_ids
from edgedec.decoding.prompt_length import encode_prompt
from edgedec.decoding.session_pool import SessionPool
from edgedec.errors import CancelledError, RequestError, TemplateError, argument
from edgedec.gguf.pooling import Pooling
from edgedec.grammar import GRAMMAR_BYTES, Grammars, chosen_grammar
from edgedec.memory_plan import MemoryPlan
from edgedec.model import LayerSet, Model, ModelCard, Session
from edgedec.progress import CancelToken
from edgedec.sampling import SamplingParams
from edgedec.scheduler.recorder import share_of_halves
from edgedec.sequence import COUPLED, Generation, Request
from edgedec.tokenizer import Tokenizer


class Engine:
    """A loaded model, as edgedec.load returns it. Several threads may use it.

    As many requests as it was loaded for (n_parallel) are generated at the same time and share forwards; further ones
    wait for their turn.

    Attributes:
        model: The runtime's model, for forwards without sampling.
        card: The facts of the model.
        tokenizer: The model's tokenizer.
        plan: The memory plan that the model was loaded under; without terms where nothing was planned.
        held_bytes: Bytes that count against the caps of models loaded later; 0 once the engine is closed.
    """

    def __init__(
        self,
        model: Model,
        slots: Sequence[SessionSlot],
        template: ChatTemplate | None,
        plan: MemoryPlan,
        small_model: Model | None = None,
        grammar_bytes: int = GRAMMAR_BYTES,
        path: Path | None = None,
    ) -> None:
        self.model = model
        self.card: ModelCard = model.card
        self.tokenizer: Tokenizer = model.tokenizer
        self._small_model = small_model
        self._pool = SessionPool(slots)
        self._embedder = Embedder(self._pool, model.card, path)
        self._slot = slots[0]
        self._template = template
        self._grammars = Grammars(self.tokenizer, grammar_bytes)
        self.plan = plan
        self.held_bytes = 0

    @property
    def n_ctx(self) -> int:
        """Tokens of the context of a generation."""
        return self._slot.session.n_ctx

    @property
    def curve(self) -> CostCurve:
        """The measured cost of forwards."""
        return self._slot.curve

    @property
    def n_prompt_max(self) -> int:
        """Most tokens of a prompt: one fewer than a text may have, which is the context unless that slides."""
        return self._slot.session.n_text_max - 1

    def forget(self) -> None:
        """Forget what the drafters keep between requests, and what was measured of their acceptance.

        So a trained head that rests, because it accepted too little, drafts again.
        """
        if self._slot.drafting is not None:
            with self._pool.all() as slots:
                for slot in slots:
                    if slot.drafting is not None:
                        slot.drafting.forget()

    def session(self, n_ctx: int | None = None) -> Session:
        """Open a session of the runtime, with a KV cache of its own, for forwards without sampling; you close it.

        `n_ctx` is its context in tokens, the engine's by default.
        """
        return self._slot.session.open(n_ctx or self.n_ctx)

    def sampling(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return sampling parameters: the options given, then the model's own defaults, then edgedec's.

        Raises:
            RequestError: An option is unknown or out of range.
        """
        unknown = set(options) - set(SamplingParams.names())
        if unknown:
            raise RequestError(
                f"unknown option {', '.join(sorted(unknown))}; known: {', '.join(SamplingParams.names())}; of a "
                f"request also {', '.join(sorted(set(RequestOptions.__annotations__) - set(SamplingParams.names())))}"
            )
        return replace(replace(SamplingParams(), **self.card.sampling_defaults), **options)  # type: ignore[arg-type]

    def generate(
        self, prompt: Prompt, *, cancel: CancelToken | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Generate a text after a prompt (text, or token ids) and return it whole; options and errors as of stream().

        When `cancel` stops it, the text so far is returned, with finish_reason "cancelled".
        """
        return _finished(self.stream(prompt, cancel=cancel, **options))

    def stream(
        self, prompt: Prompt, *, cancel: CancelToken | None = None, **options: Unpack[RequestOptions]
    ) -> TokenStream:
        """Generate token by token after a prompt (text, or token ids). Dropping the stream stops the generation.

        Args:
            prompt: The text or the token ids to go on from.
            cancel: Stops the generation, from any thread.
            **options: Those of edgedec.api.request_options.RequestOptions: the fields of SamplingParams, and reuse,
                draft, verify, grammar, json_schema, json_close and on_progress.

        Raises:
            PromptTooLongError: The prompt does not fit the context.
            RequestError: An option is unknown or out of range, the prompt is empty, the grammar is invalid or not
                supported, or json_close finds no text of the grammar within max_tokens.
        """
        reuse, draft, rule = options.pop("reuse", "exact"), options.pop("draft", True), options.pop("verify", COUPLED)
        close, on_progress = options.pop("json_close", False), options.pop("on_progress", None)
        grammar = options.pop("grammar", None), options.pop("json_schema", None)
        request = self._request(prompt, cast(SamplingOptions, options))
        require_rule(rule)
        request = replace(request, reuse=reuse, draft=draft, rule=rule)
        chosen = chosen_grammar(*grammar, close=close)
        bias = request.sampling.logit_bias
        constraint = None if chosen is None else self._grammars.open(chosen, bias, close=close)
        return TokenStream(self._pool, request, cancel, on_progress, constraint)

    def _request(self, prompt: Prompt, options: SamplingOptions) -> Request:
        """Return the plain request for a prompt, with a seed drawn where none is given."""
        if self.card.pooling is not None:
            raise RequestError(
                f"{self.card.name!r} is an embedding model, which writes no texts; use embed(), or load another model"
            )
        token_ids, sampling = self.prompt_ids(prompt), self.sampling(**options)
        return Request(token_ids, sampling, secrets.randbits(63) if sampling.seed is None else sampling.seed)

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return a prompt's token ids.

        Raises:
            PromptTooLongError: The prompt is a text that does not fit the context.
            RequestError: The prompt is neither a text nor a sequence of whole numbers.
        """
        if isinstance(prompt, str):
            return tuple(encode_prompt(self.tokenizer, prompt, self.n_prompt_max))
        return as_token_ids(prompt)

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        cancel: CancelToken | None = None,
    ) -> NDArray[np.float32]:
        """Return f32[n_texts, n_dimensions]: a vector of length 1 for each text.

        A vector depends on its text alone. Each text is read from its beginning, so the KV cache of an earlier request
        is lost.

        Args:
            texts: Texts, or their token ids.
            pooling: "mean", "cls" or "last"; None for what the model was trained for. A model that was not trained to
                embed needs it: its hidden states say something of a text, but less than an embedding model's.
            dimensions: Keep only so many numbers of each vector, the first ones; None for all.
            cancel: Stops the work, from any thread.

        Raises:
            RequestError: `pooling` or `dimensions` is out of range, a text is empty, or the model was not trained to
                embed and `pooling` is None.
            PromptTooLongError: A text does not fit the context.
            CapabilityError: The runtime has no hidden states.
            CancelledError: `cancel` stopped the work.
        """
        chosen = require_pooling(self.card, pooling)
        require_dimensions(self.card, dimensions)
        all_ids = [self.prompt_ids(text) for text in texts]
        return self._embedder.vectors(all_ids, chosen, dimensions, CancelToken() if cancel is None else cancel)

    def infill_ids(self, before: str, after: str, *, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Return a prompt, as token ids, that makes the model write what belongs between two texts.

        Args:
            before: The text before the gap.
            after: The text after the gap.
            files: Names and texts of other files that the model may look at.

        Raises:
            RequestError: The model has no tokens for filling in the middle.
            PromptTooLongError: The prompt does not fit the context.
        """
        return gap_ids(self.tokenizer, Gap(before, after, files=tuple(files)), self.n_prompt_max)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        cancel: CancelToken | None = None,
        think: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Answer the last of `messages` ({"role": ..., "content": ...}) and return the answer whole.

        The options are those of stream(), but `reuse` is "longest" by default: all of the conversation that is in the
        KV cache is reused. Where the runtime is not batch-invariant, the text may then differ from a cold start's;
        reuse="exact" rules that out.

        Args:
            messages: The chat, oldest message first.
            cancel: Stops the generation, from any thread.
            think: Whether the model thinks before it answers, for models whose chat template can change that; None for
                what the template does by itself. What was thought is part of the text, between <think> and </think>.
            **options: Those of stream().

        Raises:
            TemplateError: The model has no chat template, or the template fails.
            PromptTooLongError: The conversation does not fit the context; see fit_messages.
            RequestError: The template can't do what `think` says; or as stream().
        """
        return _finished(self.chat_stream(messages, cancel=cancel, think=think, **options))

    def chat_stream(
        self,
        messages: Sequence[Message],
        *,
        cancel: CancelToken | None = None,
        think: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> TokenStream:
        """Answer the last of `messages` token by token; as chat()."""
        chosen: RequestOptions = {"reuse": "longest", **options}
        try:
            variables = thinking_variables(self.template, think)
            token_ids = self.chat_ids(messages, cancel=cancel, variables=variables)
        except CancelledError:
            token_ids = []  # the stream ends before it begins
        return self.stream(token_ids, cancel=cancel, **chosen)

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt that the chat template makes of `messages`, and of tools in OpenAI's form, as token ids.

        Args:
            messages: The chat, oldest message first.
            tools: The functions that the model may call.
            cancel: Ends the rendering.
            variables: Further variables of the model's template, such as {"enable_thinking": False}.

        Raises:
            CancelledError: `cancel` ended the rendering.
            TemplateError: The model has no chat template, or the template fails.
            PromptTooLongError: The conversation does not fit the context.
        """
        return self.rendered_ids(self.render(messages, tools=tools, cancel=cancel, variables=variables))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the chat template makes of `messages` as text (raises what chat_ids raises)."""
        return self._chats().render(messages, tools, cancel, variables)

    def rendered_ids(self, text: str) -> list[int]:
        """Return the token ids of a prompt of render() (PromptTooLongError where they don't fit the context)."""
        return self._chats().ids(text)

    def _chats(self) -> ChatPrompts:
        if self._template is None:
            raise TemplateError(
                f"the model {self.card.name!r} has no chat template: it continues text rather than answers; "
                f"use generate() (--raw), or load it with {argument('chat_template')}"
            )
        return ChatPrompts(self._template, self.tokenizer, self.n_prompt_max)

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template (TemplateError where it has none)."""
        return self._chats().template

    def fit_messages(self, messages: Sequence[Message], n_reserved: int) -> tuple[list[Message], int]:
        """Return the messages without the oldest turns, so that `n_reserved` tokens are free for the answer.

        Also return how many messages are left out.
        """
        return self._chats().fit(messages, self.n_ctx - 1 - n_reserved)

    def record(
        self,
        prompt: Prompt,
        *,
        share: Callable[[LayerSet], float] = share_of_halves,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Generate plainly, and return in `proposals` what the drafters proposed after every token.

        Args:
            prompt: The text or the token ids to go on from.
            share: Gives the share of a token's bytes, the head's included, that a set of half-layers reads; it is noted
                for each forward that drafting makes.
            **options: The fields of SamplingParams.
        """
        return _finished(TokenStream(self._pool, replace(self._request(prompt, options), record=share)))

    async def agenerate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generation:
        """Generate without blocking the event loop; cancelling the task stops the generation."""
        return await aio.in_thread(lambda cancel: self.generate(prompt, cancel=cancel, **options))

    async def achat(
        self, messages: Sequence[Message], *, think: bool | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Answer without blocking the event loop; cancelling the task stops the generation."""
        return await aio.in_thread(lambda cancel: self.chat(messages, cancel=cancel, think=think, **options))

    def astream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> aio.AsyncTokenStream:
        """Generate token by token without blocking the event loop; leaving the loop stops the generation."""
        return aio.AsyncTokenStream(lambda cancel: self.stream(prompt, cancel=cancel, **options))

    def achat_stream(
        self, messages: Sequence[Message], *, think: bool | None = None, **options: Unpack[RequestOptions]
    ) -> aio.AsyncTokenStream:
        """Answer token by token without blocking the event loop; leaving the loop stops the generation."""
        return aio.AsyncTokenStream(lambda cancel: self.chat_stream(messages, cancel=cancel, think=think, **options))

    def save_prompt_cache(self, path: str | os.PathLike[str]) -> None:
        """Write the KV cache of the last request to a file; load_prompt_cache goes on from it in another process.

        Raises:
            StorageError: The file can't be written, or another file has its name.
            CapabilityError: The session can't be saved.
        """
        with self._pool.all():
            write_prompt_cache(Path(path), cache_of(self._pool.last))

    def load_prompt_cache(self, path: str | os.PathLike[str]) -> int:
        """Restore the KV cache from a file of save_prompt_cache; return how many tokens it holds.

        Raises:
            ModelFormatError: The file is damaged, or was made with another model, release or options.
            StorageError: The file can't be read.
        """
        cache = read_prompt_cache(Path(path), self.card.fingerprint)
        with self._pool.all():
            restore_cache(self._pool.last, cache)
        return len(cache.token_ids)

    def save_draft_store(self) -> None:
        """Write the file of load(draft_store=...) now, as close() does, if there is something new to write.

        Raises:
            StorageError, ModelFormatError: The file can't be written, or is another model's by now; close() then
                does not try again.
        """
        if self._slot.drafting is not None:
            with self._pool.all():
                self._slot.drafting.save()

    def close(self) -> None:
        """End all streams, paused ones too, and free the model; calling it again does nothing.

        A stream that is ended raises StopIteration at its next token; its finish_reason is "cancelled". If close() is
        called from within a stream (by on_progress or a drafter), the model is freed after that stream's step.

        Raises:
            StorageError, ModelFormatError: The model is freed, but the draft store could not be written.
        """
        for slot in self._pool.slots:
            slot.closing = True
            slot.session.cancel()
        if os.getpid() != self._slot.pid:  # in a forked child
            self._close_models()
            return
        streams = [stream for slot in self._pool.slots if (stream := slot.stream and slot.stream())]
        for stream in streams:
            stream.cancel()  # all of them, before the first is waited for
        if any(stream.close_soon(self.close) for stream in streams):
            return
        for stream in streams:
            stream.close()
        with self._pool.all():
            self._close_models()

    def _close_models(self) -> None:
        self.held_bytes = 0
        drafting = self._slot.drafting
        for slot in self._pool.slots:
            if slot.drafting is not None:
                slot.drafting.close()
        if self._small_model is not None:
            self._small_model.close()
        self.model.close()
        if drafting is not None and os.getpid() == self._slot.pid:
            drafting.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _finished(stream: TokenStream) -> Generation:
    for _ in stream:
        pass
    return stream.generation
