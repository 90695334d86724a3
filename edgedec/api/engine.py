"""The engine that an application holds: a loaded model with its sessions, which writes texts and makes prompts.

It is one class, of more lines than other files have: what a caller can ask of a model is read in one place.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from edgedec.api.async_api import AsyncSampleStream, AsyncTokenStream, awaited
from edgedec.api.requests import Prompt, RequestOptions, Requests, adapter_scales
from edgedec.callers import checks_methods
from edgedec.chat import Chat, Message, drop_oldest_turns, messages_of
from edgedec.closeable import Closeable
from edgedec.control_tokens import SaidTemplate
from edgedec.decoding.generate import TokenStream, finished
from edgedec.decoding.grammars import Grammars
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.errors import OptionError, RequestError, argument
from edgedec.load_plan import LoadPlan
from edgedec.memory.setting import HELD, Held
from edgedec.memory_plan import MemoryPlan, format_bytes
from edgedec.model import Model, Session
from edgedec.model_card import ModelCard
from edgedec.progress import CancelToken, report_progress
from edgedec.runtime import processes_of
from edgedec.sequence import Generation, Until
from edgedec.tokenizer import Tokenizer

if TYPE_CHECKING:  # what few texts need is imported when it is asked for
    from edgedec.decoding.samples import SampleStream


@checks_methods
class Engine(Closeable):
    """A loaded model that writes texts, as edgedec.load returns it: whole or token by token, several, or the best.

    Several threads may use it. As many requests as it was loaded for (n_parallel) are generated at the same time and
    share forwards; further ones wait for their turn.

    Attributes:
        model: The runtime's model, for forwards without sampling.
        card: The facts of the model.
        tokenizer: The model's tokenizer.
        path: The model's file.
        plan: The memory plan that the model was loaded under; without terms where nothing was planned.
        template: The model's chat template, or None. A template that is broken refuses every chat.
        pool: The sessions that requests are generated on, each with what a generation on it must know.
        requests: Makes prompts and requests step by step, for servers and for generations of one's own.
    """

    def __init__(  # called by load alone, which names each of them
        self,
        *,
        model: Model,
        slots: Sequence[SessionSlot],
        template: SaidTemplate | None,
        plan: LoadPlan,
        held: MemoryPlan,
        companion: Model | None,
        grammar_bytes: int,
    ) -> None:
        """Hold what load has opened; the attributes say what is not told here.

        Args:
            slots: The sessions of the requests that are generated at the same time.
            template: The chat template, or None.
            plan: What was loaded.
            held: What the model holds: the plan's memory, or what the model says where none was planned.
            companion: A further model that writes with this one, or None.
            grammar_bytes: Most bytes that compiled grammars take.
        """
        self.model, self.plan, self.path = model, plan.memory, plan.path
        self.card: ModelCard = model.card
        self.tokenizer: Tokenizer = model.tokenizer
        most_on_device = max((held.device_bytes(cap.device.name) for cap in held.devices), default=0)
        self._held = Held(held.own_bytes, most_on_device)
        HELD.add(self._held)
        self._companion, self.template = companion, template
        self.pool, self._slot = SessionPool(slots), slots[0]
        grammars = Grammars(self.tokenizer, grammar_bytes, self.card.fingerprint)
        self.requests = Requests(model, self._slot, grammars, template, plan)

    def __repr__(self) -> str:
        held = format_bytes(self.held_bytes) if self.held_bytes else "closed"
        return f"<Engine {self.path.stem}: {self.card.runtime}, {self.n_ctx} tokens of context, {held}>"

    def generate(
        self, prompt: Prompt, *, cancel: CancelToken | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Generate a text after a prompt (text, or token ids) and return it whole; options and errors as of stream().

        When `cancel` stops it, the text so far is returned, with finish_reason "cancelled".
        """
        return finished(self.stream(prompt, cancel=cancel, **options))

    def stream(
        self, prompt: Prompt, *, cancel: CancelToken | None = None, **options: Unpack[RequestOptions]
    ) -> TokenStream:
        """Generate token by token after a prompt (text, or token ids). Dropping the stream stops the generation.

        Args:
            prompt: The text or the token ids to go on from.
            cancel: Stops the generation, from any thread.
            **options: Those of edgedec.api.requests.RequestOptions: the fields of SamplingParams, and reuse,
                draft, verify, grammar, json_schema, json_close, prediction, predicate, futures, methods, resume and
                on_progress.

        Raises:
            PromptTooLongError: The prompt does not fit the context.
            RequestError: An option is unknown or out of range, the prompt is empty, the grammar is invalid or not
                supported, or json_close finds no text of the grammar within max_tokens.
        """
        on_progress = options.pop("on_progress", None)
        request, open_constraint = self.requests.prepared(prompt, options)
        return TokenStream(self.pool, request, cancel, on_progress, open_constraint())

    def chat(
        self,
        messages: Chat,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
        think: bool | int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Answer a text, or the last of several messages ({"role": ..., "content": ...}), and return the answer whole.

        The options are those of stream(), but `reuse` is "longest" by default: all of the conversation that is in the
        KV cache is reused. Where the runtime is not batch-invariant, the text may then differ from a cold start's;
        reuse="exact" rules that out.

        Args:
            messages: What the user says, or the chat, oldest message first. A content may have parts {"type": "image",
                "image": ...}, or a list "images" beside it: bytes, paths or PIL.Images.
            tools: The functions that the model may call, in OpenAI's form; a call is part of the text.
            cancel: Stops the generation, from any thread.
            think: Whether the model thinks before it answers, where its chat template can change that, or for how many
                tokens; None for what the template does by itself. What was thought is part of the text, between
                <think> and </think>. A grammar binds what follows; without `think`, all of the text, unless the prompt
                itself begins to think.
            **options: Those of stream().

        Raises:
            TemplateError: The model has no chat template, or the template fails.
            PromptTooLongError: The conversation does not fit the context; see fit_messages.
            RequestError: The template can't do what `think` says; or as stream().
        """
        return finished(self.chat_stream(messages, tools=tools, cancel=cancel, think=think, **options))

    def chat_stream(
        self,
        messages: Chat,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
        think: bool | int | None = None,
        **options: Unpack[RequestOptions],
    ) -> TokenStream:
        """Answer the last of `messages` token by token; as chat()."""
        token_ids, chosen = self.requests.chat_prompt(messages, cancel, think, options, tools)
        return self.stream(token_ids, cancel=cancel, **chosen)

    def samples(
        self,
        prompt: Prompt | Sequence[Message],
        n: int = 8,
        *,
        until: Until | None = None,
        cancel: CancelToken | None = None,
        think: bool | int | None = None,
        **options: Unpack[RequestOptions],
    ) -> tuple[Generation, ...]:
        """Generate `n` texts of one prompt together and return them; parameters and errors as of samples_stream().

        When `cancel` stops them, the texts so far are returned, with finish_reason "cancelled".
        """
        on_progress, most = options.get("on_progress"), options.get("max_tokens")
        stream = self.samples_stream(prompt, n, until=until, cancel=cancel, think=think, **options)
        for n_tokens, _ in enumerate(stream, 1):
            report_progress(on_progress, "generating", n_tokens, most and most * n, "tokens")
        return stream.generations

    def samples_stream(
        self,
        prompt: Prompt | Sequence[Message],
        n: int = 8,
        *,
        until: Until | None = None,
        cancel: CancelToken | None = None,
        think: bool | int | None = None,
        **options: Unpack[RequestOptions],
    ) -> "SampleStream":
        """Generate `n` texts of one prompt together, token by token. Dropping the stream stops all of them.

        The prompt is read once, and the texts share its KV cache. All texts have their rows in common forwards, which
        cost little more than those of one text. Text k is exactly the text of the seed plus k alone. Between two tokens
        the stream's fork(), drop() and choose() change which texts go on.

        Where a row depends on what else is in its forward (all runtimes but `cpu`), the texts are written one after
        another, and their statistics say so.

        Args:
            prompt: A text, token ids, or the messages of a chat, of which the last is answered.
            n: How many texts, 1 to 256.
            until: Is called when texts have ended, with all that ended so far, the shortest first. When it returns
                True, the others are "cancelled" at the length of the longest of these. No text is read ahead of others.
            cancel: Stops all texts, from any thread.
            think: Whether the model thinks before it answers a chat; as of chat().
            **options: Those of stream(), and for a chat those of chat_stream(). The default of `logprobs` is 0 here:
                each Generation has the sum of its log-probabilities, `logprob_sum`; None leaves them out.

        Raises:
            RequestError: `n` is out of range, or as stream().
            MemoryCapError: The memory plan has no room for so many texts.
            PromptTooLongError, TemplateError: As stream() and chat_stream().
        """
        from edgedec.decoding.samples import SampleStream

        continued, options = self.requests.chat_or_prompt(prompt, cancel, think, options)
        on_progress = options.pop("on_progress", None)
        options.setdefault("logprobs", 0)
        if len(options.get("resume", ())):
            raise RequestError(f"several texts can't be resumed: leave {argument('resume')} out, or ask for one text")
        request, open_constraint = self.requests.prepared(continued, options)
        return SampleStream(self.pool, request, n, open_constraint, until=until, cancel=cancel, on_progress=on_progress)

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
        requests = self.requests
        marked, pictures = requests.mark_pictures(messages)
        text = requests.render(marked, tools=tools, cancel=cancel, variables=variables)
        return requests.rendered_ids(text, pictures)

    def fit_messages(
        self, messages: Chat, n_reserved: int, tools: Sequence[Mapping[str, object]] | None = None
    ) -> tuple[list[Message], int]:
        """Return the messages without the oldest turns, so that `n_reserved` tokens are free for the answer.

        Also return how many messages are left out. `tools`, in OpenAI's form, are part of the prompt.
        """
        if n_reserved < 0:
            raise OptionError("n_reserved", n_reserved, "it must be from 0")
        messages, n_most = messages_of(messages), self.n_ctx - 1 - n_reserved
        marked, pictures = self.requests.mark_pictures(messages)
        fitting, n_left_out = drop_oldest_turns(
            marked, lambda some: self.requests.n_rendered(some, n_most, tools, pictures), n_most
        )
        by_mark = {id(mark): message for mark, message in zip(marked, messages, strict=True)}
        return [by_mark[id(mark)] for mark in fitting], n_left_out

    @property
    def held_bytes(self) -> int:
        """Bytes that count against the caps of models loaded later; 0 once the engine is closed."""
        return self._held.n_bytes

    @property
    def processes(self) -> tuple[int, ...]:
        """The further processes that run its models now, whose memory counts as this process's; mostly none."""
        return processes_of(self.model, self._companion, self.requests.pictures)

    @property
    def lora(self) -> tuple[float, ...]:
        """The scale of each adapter (ModelCard.adapters) in requests that name none; it may be set at any time."""
        return self.requests.scales

    @lora.setter
    def lora(self, scales: Sequence[float]) -> None:
        self.requests.scales = adapter_scales(scales, len(self.card.adapters))

    @property
    def n_ctx(self) -> int:
        """Tokens of the context of a generation."""
        return self._slot.session.room(0)

    def forget(self) -> None:
        """Forget what the drafters keep between requests, and what was measured of their acceptance.

        So a trained head that rests, because it accepted too little, drafts again.
        """
        if self._slot.drafting is not None:  # that of all slots
            with self.pool.all():
                self._slot.drafting.forget()

    def session(self, n_ctx: int | None = None) -> Session:
        """Open a session of `n_ctx` tokens, the engine's by default, for forwards without sampling; you close it."""
        session = self._slot.session.model.session(self.n_ctx if n_ctx is None else n_ctx)
        if any(self.lora):
            session.scales = self.lora
        return session

    def close(self) -> None:
        """End all streams, paused ones too, and free the model; calling it again does nothing.

        A stream that is ended raises StopIteration at its next token; its finish_reason is "cancelled". If close() is
        called from within a stream (by on_progress or a drafter), the model is freed after that stream's step.

        Raises:
            StorageError, ModelFormatError: The model is freed, but the draft store could not be written.
        """
        for slot in self.pool.slots:
            slot.closing = True
            slot.session.cancel()
        if os.getpid() != self._slot.pid:  # in a forked child
            self._close_models()
            return
        streams = [stream for slot in self.pool.slots if (stream := slot.stream and slot.stream())]
        for stream in streams:
            stream.cancel()  # all of them, before the first is waited for
        if any(stream.close_soon(self.close) for stream in streams):
            return
        for stream in streams:
            stream.close()
        with self.pool.all():
            self._close_models()

    def _close_models(self) -> None:
        self._held.n_bytes = self._held.gpu_bytes = 0
        drafting = self._slot.drafting
        if drafting is not None:
            drafting.close()
        if self._companion is not None:
            self._companion.close()
        if self.requests.pictures is not None:
            self.requests.pictures.close()
        self.model.close()
        if drafting is not None and os.getpid() == self._slot.pid:
            drafting.save()

    agenerate = awaited(generate)
    achat = awaited(chat)
    asamples = awaited(samples)

    def asamples_stream(
        self,
        prompt: Prompt | Sequence[Message],
        n: int = 8,
        *,
        until: Until | None = None,
        think: bool | int | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncSampleStream:
        """Generate as samples_stream() without blocking the event loop; leaving the loop stops all texts."""
        return AsyncSampleStream(
            lambda cancel: self.samples_stream(prompt, n, until=until, cancel=cancel, think=think, **options)
        )

    def astream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncTokenStream:
        """Generate token by token without blocking the event loop; leaving the loop stops the generation."""
        return AsyncTokenStream(lambda cancel: self.stream(prompt, cancel=cancel, **options))

    def achat_stream(
        self,
        messages: Chat,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        think: bool | int | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncTokenStream:
        """Answer token by token without blocking the event loop; leaving the loop stops the generation."""
        return AsyncTokenStream(
            lambda cancel: self.chat_stream(messages, tools=tools, cancel=cancel, think=think, **options)
        )


def save_draft_store(engine: Engine) -> None:
    """Write the file of load(draft_store=...) now, as close() does, if there is something new to write.

    Raises:
        StorageError, ModelFormatError: The file can't be written, or is another model's by now; close() then does not
            try again.
    """
    drafting = engine.pool.slots[0].drafting
    if drafting is not None:
        with engine.pool.all():
            drafting.save()
