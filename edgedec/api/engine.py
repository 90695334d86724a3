"""What an application holds: a loaded model that generates, streams and chats."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypedDict, Unpack

import numpy as np

from edgedec.api import async_api as aio
from edgedec.api.chat_prompt import ChatPrompts
from edgedec.api.prompt_cache import PromptCache, read_prompt_cache, write_prompt_cache
from edgedec.chat import ChatTemplate, Message
from edgedec.cost_curve import CostCurve
from edgedec.decoding.generate import SessionSlot, TokenStream
from edgedec.decoding.prompt_length import encode_prompt
from edgedec.decoding.session_pool import SessionPool
from edgedec.errors import CancelledError, ModelFormatError, RequestError, SessionError, TemplateError
from edgedec.grammar import GRAMMAR_BYTES, Grammar, Grammars, JsonSchema, chosen_grammar
from edgedec.memory_plan import MemoryPlan
from edgedec.model import LayerSet, Model, ModelCard, Session
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import SamplingParams
from edgedec.scheduler.recorder import share_of_halves
from edgedec.sequence import COUPLED, Generation, Request
from edgedec.sessions.batching import BatchedSession
from edgedec.sessions.sliding_window import holder, text_limit
from edgedec.tokenizer import Tokenizer
from edgedec.verification import RULES

Prompt = str | Sequence[int]
Reuse = Literal["exact", "longest"]


class SamplingOptions(TypedDict, total=False):
    """The options of SamplingParams, each of which may be left to the model's own default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    logit_bias: Mapping[int, float]
    seed: int | None
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    ignore_end: bool


class RequestOptions(SamplingOptions, total=False):
    """Those, and the others of a request; as in Engine.stream."""

    reuse: Reuse
    draft: bool
    verify: str
    grammar: Grammar | None
    json_schema: JsonSchema | None
    json_close: bool
    on_progress: OnProgress | None


class Engine:
    """A loaded model. Made by edgedec.load; may be used from several threads.

    Their requests share forwards, up to as many at once as it was loaded for; beyond that they take pool.

    Attributes:
        plan: The memory plan it was loaded under (without terms where no cap was given).
        held_bytes: Bytes that count against the caps of models loaded later; 0 once the engine is closed.
    """

    def __init__(
        self,
        model: Model,
        targets: Sequence[SessionSlot],
        template: ChatTemplate | None,
        plan: MemoryPlan,
        small_model: Model | None = None,
        grammar_bytes: int = GRAMMAR_BYTES,
    ) -> None:
        self._model = model
        self._small_model = small_model
        self._pool = SessionPool(targets)
        self._target = targets[0]
        self._template = template
        self._grammars = Grammars(model.tokenizer, grammar_bytes)
        self.plan = plan
        self.held_bytes = 0

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""
        return self._model.card

    @property
    def model(self) -> Model:
        """The runtime's model, for the level below."""
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def n_ctx(self) -> int:
        """Tokens of the context that generations use."""
        return self._target.session.n_ctx

    @property
    def curve(self) -> CostCurve:
        """The measured cost of forwards."""
        return self._target.curve

    @property
    def n_prompt_max(self) -> int:
        """Most tokens of a prompt: one fewer than the context has, or than a text may have where the context slides."""
        return text_limit(self._target.session) - 1

    def forget(self) -> None:
        """Empty what drafters keep between requests, and what is known of their acceptance."""
        if self._target.drafting is not None:
            with self._pool.all() as targets:
                for target in targets:
                    if target.drafting is not None:
                        target.drafting.forget()

    def session(self, n_ctx: int | None = None) -> Session:
        """Open a session of the runtime: KV cache and forward, without sampling or pool. Close it yourself."""
        held = holder(self._target.session)
        opener = held.batcher if isinstance(held, BatchedSession) else self._model
        return opener.session(n_ctx or self.n_ctx)

    def sampling(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return the parameters that these options mean for this model: its own defaults, then edgedec's.

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
        """Generate text after a prompt (text, or token ids) and return it whole; options as those of stream().

        Cancelling returns what was generated so far, with finish_reason "cancelled".
        """
        return _finished(self.stream(prompt, cancel=cancel, **options))

    def stream(
        self,
        prompt: Prompt,
        *,
        reuse: Reuse = "exact",
        draft: bool = True,
        verify: str = COUPLED,
        grammar: Grammar | None = None,
        json_schema: JsonSchema | None = None,
        json_close: bool = False,
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Generate token by token after a prompt (text, or token ids). Dropping the stream stops it.

        Args:
            reuse: How much of the KV cache of earlier requests is used: "exact" only what leaves the text as a
                cold start gives it, "longest" all that the prompts share.
            draft: Whether drafts may be verified; the text is the same.
            verify: The rule by which: "coupled"; or "tokenwise", "block", "recursive", "kseq", "multipath", which give
                a text of the same distribution, not the same text.
            grammar: What the text keeps to; it ends where the grammar does. Needs the extra `grammar`.
            json_schema: The same for JSON under a schema (an object, or its text): Grammar.json_schema(...).
            json_close: Keep the last of max_tokens, or of what the context has left, to make the JSON (or any grammar's
                text) whole: the text goes on as it would without, as long as the shortest end found still fits.
            cancel: Stops the generation, from any thread.
            on_progress: Called while the prompt is read.
            options: Those of SamplingParams.

        Raises:
            PromptTooLongError: The prompt does not fit the context.
            RequestError: An option is out of range, the prompt is empty, or the grammar is invalid or not supported, or
                with json_close no text of it is as short as max_tokens.
        """
        token_ids = self.prompt_ids(prompt)
        sampling = self.sampling(**options)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        require_rule(verify)
        request = Request(token_ids, sampling, seed, reuse, draft, verify)
        chosen = chosen_grammar(grammar, json_schema, close=json_close)
        constraint = None if chosen is None else self._grammars.open(chosen, sampling.logit_bias, close=json_close)
        return TokenStream(self._pool, request, cancel, on_progress, constraint)

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return a prompt's tokens.

        Raises:
            PromptTooLongError: The prompt is a text that does not fit the context.
            RequestError: It is neither text nor whole numbers (bytes would be ids).
        """
        if isinstance(prompt, str):
            return tuple(encode_prompt(self.tokenizer, prompt, self.n_prompt_max))
        try:
            if not isinstance(prompt, bytes | bytearray):
                return tuple(map(index, prompt))
        except TypeError:
            pass
        raise RequestError(f"a prompt must be a string or a sequence of token ids, found {type(prompt).__name__}")

    def chat(
        self, messages: Sequence[Message], *, cancel: CancelToken | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Answer the last of `messages` ({"role": ..., "content": ...}) and return the answer whole.

        Options are those of stream(), but `reuse` is "longest": a conversation's KV is reused as far as it goes. Where
        the runtime is not batch-invariant the text may then differ from a cold start's; reuse="exact" rules that out.

        Raises:
            TemplateError: The model has no chat template, or it fails.
            PromptTooLongError: The conversation does not fit the context; see fit_messages.
        """
        return _finished(self.chat_stream(messages, cancel=cancel, **options))

    def chat_stream(
        self, messages: Sequence[Message], *, cancel: CancelToken | None = None, **options: Unpack[RequestOptions]
    ) -> TokenStream:
        """Answer token by token; as chat()."""
        chosen: RequestOptions = {"reuse": "longest", **options}
        try:
            token_ids = self.chat_ids(messages, cancel=cancel)
        except CancelledError:
            token_ids = []  # the stream ends before it begins
        return self.stream(token_ids, cancel=cancel, **chosen)

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
    ) -> list[int]:
        """Return the prompt that the chat template makes of `messages`, and of tools in OpenAI's form, as token ids.

        Raises:
            CancelledError: `cancel` ended the rendering.
            TemplateError: The model has no chat template, or it fails.
            PromptTooLongError: The conversation does not fit the context.
        """
        return self.rendered_ids(self.render(messages, tools=tools, cancel=cancel))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
    ) -> str:
        """Return the prompt that the chat template makes of `messages` as text; raises what chat_ids raises."""
        return self._chats().render(messages, tools, cancel)

    def rendered_ids(self, text: str) -> list[int]:
        """Return what render() returned as token ids (PromptTooLongError where it does not fit the context)."""
        return self._chats().ids(text)

    def _chats(self) -> ChatPrompts:
        if self._template is None:
            raise TemplateError(
                f"the model {self.card.name!r} has no chat template: it continues text rather than answers; "
                f"use generate() (--raw), or load it with chat_template=..."
            )
        return ChatPrompts(self._template, self.tokenizer, self.n_prompt_max)

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def fit_messages(self, messages: Sequence[Message], n_reserved: int) -> tuple[list[Message], int]:
        """Leave out the oldest turns until `n_reserved` tokens are free for the answer; also return how many."""
        return self._chats().fit(messages, self.n_ctx - 1 - n_reserved)

    def record(
        self,
        prompt: Prompt,
        *,
        share: Callable[[LayerSet], float] = share_of_halves,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Generate plainly, noting in `proposals` what drafters would have proposed after every token.

        The forwards that drafting takes are noted, too. `share` says what share of a token's bytes half-layers of the
        model read, its head included.
        """
        token_ids = self.prompt_ids(prompt)
        sampling = self.sampling(**options)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        request = Request(token_ids, sampling, seed, record=share)
        return _finished(TokenStream(self._pool, request))

    async def agenerate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generation:
        """Generate without blocking the event loop; cancelling the task stops the generation."""
        return await aio.finish(lambda cancel: self.stream(prompt, cancel=cancel, **options))

    async def achat(self, messages: Sequence[Message], **options: Unpack[RequestOptions]) -> Generation:
        """Answer without blocking the event loop; cancelling the task stops the generation."""
        return await aio.finish(lambda cancel: self.chat_stream(messages, cancel=cancel, **options))

    def astream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> aio.AsyncTokenStream:
        """Generate token by token without blocking the event loop; leaving the loop stops the generation."""
        return aio.AsyncTokenStream(lambda cancel: self.stream(prompt, cancel=cancel, **options))

    def achat_stream(self, messages: Sequence[Message], **options: Unpack[RequestOptions]) -> aio.AsyncTokenStream:
        """Answer token by token without blocking the event loop; leaving the loop stops the generation."""
        return aio.AsyncTokenStream(lambda cancel: self.chat_stream(messages, cancel=cancel, **options))

    def save_prompt_cache(self, path: str | os.PathLike[str]) -> None:
        """Write the KV of the last request to a file, from which load_prompt_cache goes on."""
        with self._pool.all():
            target = self._pool.last
            n = min(len(target.cached_ids), target.session.n_cached)
            payload = _saved(target, n)
            cache = PromptCache(self.card.fingerprint, tuple(target.cached_ids[:n]), min(target.n_exact, n), payload)
        write_prompt_cache(Path(path), cache)

    def load_prompt_cache(self, path: str | os.PathLike[str]) -> int:
        """Restore a prompt cache and return how many tokens it holds.

        Raises:
            ModelFormatError: It is damaged, or of another model, release or options.
        """
        cache = read_prompt_cache(Path(path))
        if cache.fingerprint != self.card.fingerprint:
            raise ModelFormatError(
                f"the prompt cache {path} was made with another model, runtime release or options; delete it"
            )
        with self._pool.all():
            target = self._pool.last
            target.cached_ids, target.n_exact = [], 0
            target.session.load(cache.payload, len(cache.token_ids))
            target.cached_ids, target.n_exact = list(cache.token_ids), cache.n_exact
        return len(cache.token_ids)

    def save_draft_store(self) -> None:
        """Write the file of load(draft_store=...) now, as close() does; nothing where there is none, or nothing new.

        Raises:
            StorageError, ModelFormatError: It can't be written, or is another model's by now; it is not tried again.
        """
        if self._target.drafting is not None:
            with self._pool.all():
                self._target.drafting.save()

    def close(self) -> None:
        """Stop what is running, end the streams, paused ones too, and free the model; calling it again does nothing.

        A stream that this ends is over: its next token is StopIteration, its finish_reason "cancelled". Called back
        from within a stream (on_progress, a drafter), the model is freed as soon as that stream's step has ended.

        Raises:
            StorageError, ModelFormatError: All is freed, but the draft store could not be written.
        """
        for target in self._pool.slots:
            target.closing = True
            target.session.cancel()
        if os.getpid() != self._target.pid:  # in a forked child
            self._close_models()
            return
        streams = [stream for target in self._pool.slots if (stream := target.stream and target.stream())]
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
        drafting = self._target.drafting
        for target in self._pool.slots:
            if target.drafting is not None:
                target.drafting.close()
        if self._small_model is not None:
            self._small_model.close()
        self._model.close()
        if drafting is not None and os.getpid() == self._target.pid:
            drafting.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_rule(name: str) -> None:
    """Raise RequestError unless there is a verification rule of that name."""
    if not isinstance(name, str) or (name != COUPLED and name not in RULES):
        raise RequestError(f"verify is {name!r}; it must be one of {', '.join([COUPLED, *RULES])}")


def _finished(stream: TokenStream) -> Generation:
    for _ in stream:
        pass
    return stream.generation


def _saved(target: SessionSlot, n: int) -> bytes:
    """Return a session's KV of its first `n` tokens; what a draft, or a step that failed, left beyond is dropped."""
    session, chunk = target.session, target.session.model.capabilities.prefill_chunk
    with suppress(SessionError):  # branched
        if n in (0, session.n_cached):
            return session.save()
    session.forward(np.array(target.cached_ids[n - 1 : n], np.int32), n_past=n - 1)
    target.n_exact = min(target.n_exact, n if chunk == 1 else (n - 1) // chunk * chunk)
    return session.save()
