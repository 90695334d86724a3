"""The engine that an application holds: a loaded model that generates, streams and chats."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard, Unpack, cast

from edgedec.api.loaded_model import LoadedModel
from edgedec.api.requests import Prompt, RequestOptions
from edgedec.callers import checked_value, checks_methods
from edgedec.chat import Chat, Message, thinking_variables
from edgedec.decoding.generate import TokenStream, finished
from edgedec.errors import CancelledError, RequestError, argument
from edgedec.progress import CancelToken, report_progress
from edgedec.sequence import Generation, Until

if TYPE_CHECKING:  # what few texts need is imported when it is asked for
    from edgedec.api.async_api import AsyncSampleStream, AsyncTokenStream
    from edgedec.api.best_text import BestOf
    from edgedec.choosing.choice import ChosenText
    from edgedec.choosing.search_by import SearchBy
    from edgedec.decoding.samples import SampleStream


@checks_methods
class Engine(LoadedModel):
    """A loaded model that writes texts, as edgedec.load returns it: whole or token by token, several, or the best."""

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
        request, open_constraint = self.requests.wanted(prompt, options)
        return TokenStream(self.pool, request, cancel, on_progress, open_constraint())

    def chat(
        self,
        messages: Chat,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
        think: bool | None = None,
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
            think: Whether the model thinks before it answers, for models whose chat template can change that; None for
                what the template does by itself. What was thought is part of the text, between <think> and </think>.
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
        think: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> TokenStream:
        """Answer the last of `messages` token by token; as chat()."""
        token_ids, chosen = self._chat_prompt(messages, cancel, think, options, tools)
        return self.stream(token_ids, cancel=cancel, **chosen)

    def _chat_prompt(
        self,
        messages: Chat,
        cancel: CancelToken | None,
        think: bool | None,
        options: RequestOptions,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> tuple[list[int], RequestOptions]:
        """Return the prompt of a chat, and its options with their defaults; no token where `cancel` was cancelled."""
        chosen: RequestOptions = {"reuse": "longest", **options}
        try:
            variables = thinking_variables(self.template, think)
            marked, pictures = self.mark_pictures(messages)
            text = self.render(marked, tools=tools, cancel=cancel, variables=variables)
            token_ids = self.rendered_ids(text, pictures)
            if pictures:
                chosen["pictures"] = self.picture_rows(pictures, cancel=cancel, on_progress=options.get("on_progress"))
        except CancelledError:
            token_ids = []  # the stream ends before it begins
        return token_ids, chosen

    def samples(
        self,
        prompt: Prompt | Sequence[Message],
        n: int = 8,
        *,
        until: Until | None = None,
        cancel: CancelToken | None = None,
        think: bool | None = None,
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
        think: bool | None = None,
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

        if _is_chat(prompt):
            prompt, options = self._chat_prompt(prompt, cancel, think, options)
        elif think is not None:
            raise RequestError(f"{argument('think')} is for chats, and the prompt is none; leave it out")
        on_progress = options.pop("on_progress", None)
        options.setdefault("logprobs", 0)
        if len(options.get("resume", ())):
            raise RequestError(f"several texts can't be resumed: leave {argument('resume')} out, or ask for one text")
        request, open_constraint = self.requests.wanted(cast(Prompt, prompt), options)
        return SampleStream(self.pool, request, n, open_constraint, until=until, cancel=cancel, on_progress=on_progress)

    def best(
        self,
        prompt: Prompt | Sequence[Message],
        how: "BestOf | SearchBy | None" = None,
        *,
        cancel: CancelToken | None = None,
        think: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> "ChosenText":
        """Choose among several texts of a prompt, or search for the best one; docs/better-answers.md says how.

        When `cancel` stops the writing, the choice is among the texts so far; a search ends with CancelledError.

        Args:
            prompt: As of samples().
            how: How many texts, and how one is chosen, or the search; by default the majority vote of 8.
            cancel: Stops all texts and the scorer, from any thread.
            think: As of samples().
            **options: Those of samples(). Text k draws with the seed plus k. A search knows no grammar.

        Raises:
            OptionError: The search can't heed an option.
            ScorerError: The scorer raised an error, took too long, or returned something else than scores.
            What samples() and branches() raise.
        """
        from edgedec.api.best_text import BestOf, best_of, prompt_text
        from edgedec.api.search_text import searched
        from edgedec.choosing.partial_texts import AskedPrompt
        from edgedec.choosing.search_by import SearchBy

        ids: Sequence[int]
        if _is_chat(prompt):
            ids, options = self._chat_prompt(prompt, cancel, think, options)
        else:
            ids = self.prompt_ids(cast(Prompt, prompt))
        asked = AskedPrompt(self, ids, prompt_text(prompt), self.render if _is_chat(prompt) else None, cancel)
        checked_value("how", BestOf | SearchBy | None, how)
        if isinstance(how, SearchBy):
            return searched(self, asked, how, options)
        return best_of(self, asked, BestOf() if how is None else how, options)

    async def asamples(
        self,
        prompt: Prompt | Sequence[Message],
        n: int = 8,
        *,
        until: Until | None = None,
        think: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> tuple[Generation, ...]:
        """Generate as samples() without blocking the event loop; cancelling the task stops all texts."""
        from edgedec.api.async_api import in_thread

        return await in_thread(
            lambda cancel: self.samples(prompt, n, until=until, cancel=cancel, think=think, **options)
        )

    def asamples_stream(
        self,
        prompt: Prompt | Sequence[Message],
        n: int = 8,
        *,
        until: Until | None = None,
        think: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> "AsyncSampleStream":
        """Generate as samples_stream() without blocking the event loop; leaving the loop stops all texts."""
        from edgedec.api.async_api import AsyncSampleStream

        return AsyncSampleStream(
            lambda cancel: self.samples_stream(prompt, n, until=until, cancel=cancel, think=think, **options)
        )

    async def agenerate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generation:
        """Generate without blocking the event loop; cancelling the task stops the generation."""
        from edgedec.api.async_api import in_thread

        return await in_thread(lambda cancel: self.generate(prompt, cancel=cancel, **options))

    async def achat(
        self, messages: Chat, *, think: bool | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Answer without blocking the event loop; cancelling the task stops the generation."""
        from edgedec.api.async_api import in_thread

        return await in_thread(lambda cancel: self.chat(messages, cancel=cancel, think=think, **options))

    def astream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> "AsyncTokenStream":
        """Generate token by token without blocking the event loop; leaving the loop stops the generation."""
        from edgedec.api.async_api import AsyncTokenStream

        return AsyncTokenStream(lambda cancel: self.stream(prompt, cancel=cancel, **options))

    def achat_stream(
        self, messages: Chat, *, think: bool | None = None, **options: Unpack[RequestOptions]
    ) -> "AsyncTokenStream":
        """Answer token by token without blocking the event loop; leaving the loop stops the generation."""
        from edgedec.api.async_api import AsyncTokenStream

        return AsyncTokenStream(lambda cancel: self.chat_stream(messages, cancel=cancel, think=think, **options))


def _is_chat(prompt: Prompt | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
