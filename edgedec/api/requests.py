"""From what a caller gives, a prompt or a chat with options, to a request that can be generated."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any, Literal, TypedDict, TypeGuard, Unpack, cast

import numpy as np

from edgedec.callers import checks_arguments
from edgedec.chat import Chat, Message, messages_of, thinking_variables
from edgedec.constraint import OpenConstraint
from edgedec.control_tokens import SaidTemplate
from edgedec.decoding.grammars import Grammars
from edgedec.decoding.prompt_length import CUT_TEXT, count_tokens, encode_prompt, require_messages
from edgedec.decoding.session_pool import SessionSlot
from edgedec.errors import (
    CancelledError,
    OptionError,
    PromptTooLongError,
    RequestError,
    TemplateError,
    argument,
    counted,
)
from edgedec.grammar import Grammar, JsonSchema, Predicate, chosen_grammar
from edgedec.load_plan import LoadPlan
from edgedec.model import Model, writes_texts
from edgedec.pictures import Pictures, has_pictures
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sequence import COUPLED, Request
from edgedec.thought_marks import Thoughts, thoughts_of
from edgedec.tokenizer import Tokenizer

_PREDICTED_CHARACTERS = 16  # of a prediction, for each token of the context: more would hardly be looked up
Prompt = str | Sequence[int]
Reuse = Literal["exact", "longest"]


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams; the model's own default stands for each that is not given."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    momentum: float
    penalty_last_n: int
    logit_bias: Mapping[int, float]
    seed: int | None
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    ignore_end: bool
    stop_unsure: float | None


class RequestOptions(SamplingOptions, total=False):
    """The options of a request, those of sampling included.

    Attributes:
        lora: The scale of each adapter that the model was loaded with, in their order; 0 leaves one out. The default is
            what Engine.lora says.
        reuse: How much of the KV cache of earlier requests is used: "exact" (the default) only what has the bits of a
            cold start, "longest" all that the prompts share. A chat's default is "longest".
        draft: Whether drafts may be verified (the default); the text is the same either way.
        verify: The rule by which drafts are verified: "coupled" (the default) keeps the text; those of guests give a
            text of the same distribution.
        grammar: What the text keeps to; the text ends where the grammar's does. Needs the extra `grammar`.
        json_schema: The same as grammar=Grammar.json_schema(...): an object, or the text of one.
        thoughts: What may stand before the text of a grammar, and how many tokens of it; chats set it by `think`.
        json_close: Keep the last of max_tokens, or of the context, to complete the JSON (or the text of any grammar).
            The text is the same as without, as long as the shortest completion found still fits.
        prediction: What much of the text is expected to be, such as the file that it changes, as text or token ids: the
            suffix drafter looks drafts up in its first n_ctx tokens. The text is the same with any prediction.
        predicate: A function of a text and of whether it ends there, which says whether that is allowed: for what
            no grammar says. It is asked about tokens in the order of the draw, so a few questions a token are enough
            where most tokens are allowed.
        futures: What earlier texts of the prompt taught about where a grammar leads (edgedec_methods.futures). Texts
            are drawn nearer to the model's own law; a text then depends on what this object held when it began. Of the
            options of the draw only the temperature is left: the model's defaults of the others are off.
        methods: By its name, the value of each method that a package brings by an entry point of
            `edgedec.text_methods` (edgedec.text_method.TextMethod).
        resume: The token ids of an interrupted text of the same prompt, options and seed (RuntimeLostError.token_ids):
            the text goes on behind them, and is the one that it would have been. They come first in a stream.
        pictures: The rows that negative ids of the prompt stand for, by the first id of each block.
        on_progress: Called while the prompt is read; by samples() and best() also while texts are written.
    """

    lora: Sequence[float] | None
    reuse: Reuse
    draft: bool
    verify: str
    grammar: Grammar | None
    json_schema: JsonSchema | None
    thoughts: Thoughts | None
    json_close: bool
    prediction: Prompt | None
    predicate: Predicate | None
    futures: object
    methods: Mapping[str, object]
    resume: Sequence[int]
    pictures: Pictures
    on_progress: OnProgress | None


def require_rule(name: str) -> None:
    """Raise RequestError unless `name` is a verification rule."""
    if isinstance(name, str) and name == COUPLED:
        return
    from edgedec.verification.rules import rule_names

    if not isinstance(name, str) or name not in rule_names():
        raise OptionError("verify", name, f"it must be one of {', '.join(rule_names())}")


def predicted_ids(tokenizer: Tokenizer, prediction: Prompt | None, most: int) -> tuple[int, ...]:
    """Return the token ids of what a text is expected to have: at most `most` of them.

    Raises:
        RequestError: The prediction is neither a text nor a sequence of ids of the vocabulary.
    """
    if isinstance(prediction, str):
        prediction = tokenizer.encode(prediction[: _PREDICTED_CHARACTERS * most], add_special=False, most=most)
    ids = as_token_ids(() if prediction is None else prediction, "prediction")[:most]
    if not all(0 <= token_id < tokenizer.n_vocab for token_id in ids):
        raise RequestError(f"the prediction holds a token id outside the vocabulary of {tokenizer.n_vocab}")
    return ids


def adapter_scales(of_request: Sequence[float], n: int) -> tuple[float, ...]:
    """Return the scales of `n` adapters, each as a float32 (OptionError unless they are so many finite numbers)."""
    try:
        with np.errstate(over="ignore"):
            scales = tuple(map(float, np.array(of_request, np.float32).tolist()))
        if len(scales) == n and all(map(math.isfinite, scales)):
            return scales
    except (TypeError, ValueError):
        pass
    raise OptionError("lora", of_request, f"it must be {counted(n, 'number')}, one for each adapter of the model")


def as_token_ids(ids: Sequence[int], name: str = "prompt") -> tuple[int, ...]:
    """Return the token ids that an argument holds (OptionError unless all are whole numbers)."""
    try:
        return tuple(map(index, ids))
    except TypeError:
        raise OptionError(name, ids, "it must be a sequence of token ids, or where it is text, one string") from None


class Requests:
    """Makes the requests for one loaded model, and the prompts of chats; `slot` says how long a text may be.

    Attributes:
        scales: Those of the model's adapters, for requests that name none.
        pictures: Reads the pictures of messages; None where a message may have none.
    """

    def __init__(
        self, model: Model, slot: SessionSlot, grammars: Grammars, template: SaidTemplate | None, plan: LoadPlan
    ) -> None:
        self._model, self._tokenizer, self._slot, self._grammars = model, model.tokenizer, slot, grammars
        self._template, self._given_up = template, plan.memory.given_up
        self.scales, self.pictures = slot.session.scales, plan.pictures

    @property
    def n_prompt_max(self) -> int:
        """Most tokens of a prompt: those of a text, of which a model that writes needs the last one."""
        return self._slot.session.n_ctx - writes_texts(self._model)

    @checks_arguments
    def sampling(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return sampling parameters: the options given, then the model's own defaults, then edgedec's.

        Raises:
            RequestError: An option is unknown or out of range.
        """
        defaults = SamplingParams(**self._model.card.sampling_defaults)
        if "logit_bias" in options and defaults.logit_bias:  # what the model never writes, unless a caller says so
            options["logit_bias"] = {**defaults.logit_bias, **options["logit_bias"]}
        return replace(defaults, **options)

    def prepared(self, prompt: Prompt, options: RequestOptions) -> tuple[Request, OpenConstraint]:
        """Return the request that options stand for, and what opens the grammar of a text of it."""
        reuse, draft, rule = options.pop("reuse", "exact"), options.pop("draft", True), options.pop("verify", COUPLED)
        grammar = chosen_grammar(options.pop("grammar", None), options.pop("json_schema", None))
        thoughts, methods = options.pop("thoughts", None), _methods(options)
        defaults: dict[str, float] = {}
        for name, value in methods.items():
            defaults |= self._grammars.method(name).draw(value)
        predicted = predicted_ids(self._tokenizer, options.pop("prediction", None), self._slot.session.room(0))
        begun_ids, pictures = as_token_ids(options.pop("resume", ()), "resume"), options.pop("pictures", {})
        lora = options.pop("lora", None)
        request = self.plain(prompt, cast(SamplingOptions, {**defaults, **options}))
        require_rule(rule)
        request = replace(
            request, reuse=reuse, draft=draft, rule=rule, predicted_ids=predicted, begun_ids=begun_ids, methods=methods
        )
        scales = () if lora is None else adapter_scales(lora, len(self._model.card.adapters))
        request = replace(request, pictures=pictures, scales=scales or request.scales)
        return request, lambda: self._grammars.open(grammar, request, thoughts)

    def constraint_opener(
        self,
        *,
        grammar: Grammar | None = None,
        json_schema: JsonSchema | None = None,
        predicate: Predicate | None = None,
    ) -> OpenConstraint:
        """Return what opens the constraint of one text, as searches under a constraint take it.

        Raises:
            RequestError: Both a grammar and a schema are given, or one of them is invalid.
        """
        chosen = chosen_grammar(grammar, json_schema)
        methods = {} if predicate is None else {"predicate": predicate}
        request = Request((), SamplingParams(), 0, methods=methods)
        return lambda: self._grammars.open(chosen, request)

    def require_grammar(self, grammar: Grammar) -> None:
        """Raise RequestError for a grammar that can't be compiled; the latest few stay compiled."""
        self._grammars.open(grammar).close()

    def plain(self, prompt: Prompt, options: SamplingOptions) -> Request:
        """Return the plain request for a prompt, with a seed drawn where none is given."""
        self.require_writer()
        token_ids, sampling = self.prompt_ids(prompt), self.sampling(**options)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return Request(token_ids, sampling, seed, scales=self.scales)

    def require_writer(self) -> None:
        """Raise RequestError for a model that was trained to embed or rank texts."""
        if not writes_texts(self._model):
            raise RequestError(
                f"{self._model.card.name!r} is an embedding model or reranker: use embed() or rank(), or load one "
                "that writes texts"
            )

    @checks_arguments
    def cut_ids(self, text: str) -> tuple[int, ...]:
        """Return a text's token ids, cut to what fits the context; a token that ends every text stays the last one."""
        most, last = self._slot.session.room(0), self._tokenizer.encode("")[-1:]
        ends = last if last == self._tokenizer.encode("a")[-1:] else []
        ids = self._tokenizer.encode(text, most=most)
        return tuple(ids) if len(ids) <= most else (*ids[: most - len(ends)], *ends)

    def prompt_ids(self, prompt: Prompt, *, as_said: bool = False, continued: bool = True) -> tuple[int, ...]:
        """Return a prompt's token ids; Engine.prompt_ids says what the options are, and what is raised."""
        if isinstance(prompt, str):
            is_continued = continued and writes_texts(self._model)
            n_most, cut = (self.n_prompt_max, "") if is_continued else (self._slot.session.room(0), CUT_TEXT)
            n_trained = self._model.card.n_ctx_train
            return tuple(encode_prompt(self._tokenizer, prompt, n_most, n_trained, cut=cut, parse_special=not as_said))
        return as_token_ids(prompt)

    def require_template(self) -> SaidTemplate:
        """Return the model's chat template. A template that is broken refuses every chat.

        Raises:
            TemplateError: The model has none.
            RequestError: The model was trained to embed or rank texts.
        """
        self.require_writer()
        if self._template is None:
            raise TemplateError(
                f"the model {self._model.card.name!r} has no chat template: it continues text rather than answers; "
                f"use generate() (--raw), or load it with {argument('chat_template')}"
            )
        return self._template

    @checks_arguments
    def render(
        self,
        messages: Chat,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        cancel: CancelToken | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the chat template makes of `messages` as text; parameters as of Engine.chat_ids.

        Where messages spell control tokens, it holds edgedec.control_tokens.MARK, which keeps them text.

        Raises:
            PromptTooLongError: The chat has too many messages.
            What Engine.chat_ids raises.
        """
        template, messages = self.require_template(), messages_of(messages)
        require_messages(len(messages), self.n_prompt_max)
        return template.render(messages, add_generation_prompt=True, tools=tools, cancel=cancel, **(variables or {}))

    @checks_arguments
    def rendered_ids(self, text: str, pictures: Sequence[Any] = ()) -> list[int]:
        """Return the token ids of a prompt of render() (PromptTooLongError where they don't fit the context).

        Where the prompt has marks of mark_pictures(), `pictures` are that function's; their rows have negative ids.
        """
        self.require_template()
        if pictures and self.pictures is not None:
            return self.pictures.ids(self._tokenizer, text, pictures, self.n_prompt_max)
        n_trained = self._model.card.n_ctx_train
        return encode_prompt(self._tokenizer, text, self.n_prompt_max, n_trained, parse_special=True)

    def n_rendered(
        self,
        messages: Sequence[Message],
        n_most: int,
        tools: Sequence[Mapping[str, object]] | None,
        pictures: Sequence[Any],
    ) -> int:
        """Return how many tokens the prompt of a chat has; where that is above `n_most`, any number above it."""
        text = self.require_template().render(messages, add_generation_prompt=True, tools=tools)
        there = [picture for picture in pictures if picture.marker in text]
        if not there or self.pictures is None:
            return count_tokens(self._tokenizer, text, n_most)
        try:
            return len(self.pictures.ids(self._tokenizer, text, there, n_most))
        except PromptTooLongError:
            return n_most + 1

    @checks_arguments
    def mark_pictures(self, messages: Chat) -> tuple[Sequence[Message], tuple[Any, ...]]:
        """Return messages for render(), with a mark in place of each picture, and the pictures, before any is decoded.

        Raises:
            RequestError: The model reads no pictures, or a picture is damaged or beyond the limits.
        """
        messages = messages_of(messages)
        if not has_pictures(messages):
            return messages, ()
        card = self._model.card
        if self.pictures is None:
            why = "no mmproj*.gguf lies beside it; put it there"
            if "pictures left out" in self._given_up:
                why = "the memory plan left pictures out; allow more"
            remedy = f"or name it ({argument('projector')})"
            raise RequestError(f"the model {card.name!r} reads no pictures: {why}, {remedy}")
        self._model.capabilities.require("vector_rows", card.runtime)
        return self.pictures.mark(messages)

    @checks_arguments
    def picture_rows(
        self, pictures: Sequence[Any], *, cancel: CancelToken | None = None, on_progress: OnProgress | None = None
    ) -> Pictures:
        """Return the rows of the pictures of mark_pictures(), for stream(..., pictures=...).

        Raises:
            RequestError, CancelledError, RuntimeLostError: A picture is damaged; or its decoder was lost, which is
                started again by the next call.
        """
        return {} if self.pictures is None or not pictures else self.pictures.rows(pictures, cancel, on_progress)

    def chat_prompt(
        self,
        messages: Chat,
        cancel: CancelToken | None,
        think: bool | int | None,
        options: RequestOptions,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> tuple[list[int], RequestOptions]:
        """Return the prompt of a chat, and its options with their defaults; no token where `cancel` was cancelled."""
        chosen: RequestOptions = {"reuse": "longest", **options}
        try:
            variables = thinking_variables(self.require_template(), think)
            marked, pictures = self.mark_pictures(messages)
            text = self.render(marked, tools=tools, cancel=cancel, variables=variables)
            thoughts = thoughts_of(self.require_template().source, text, None if isinstance(think, bool) else think)
            grammar = options.get("grammar")
            is_asked = think is not None or (grammar is not None and grammar.kind == "tagged")
            if thoughts is not None and think is not False and (is_asked or thoughts.opened):
                chosen.setdefault("thoughts", thoughts)
            token_ids = self.rendered_ids(text, pictures)
            if pictures:
                chosen["pictures"] = self.picture_rows(pictures, cancel=cancel, on_progress=options.get("on_progress"))
        except CancelledError:
            token_ids = []  # the stream ends before it begins
        return token_ids, chosen

    def chat_or_prompt(
        self,
        prompt: Prompt | Sequence[Message],
        cancel: CancelToken | None,
        think: bool | int | None,
        options: RequestOptions,
    ) -> tuple[Prompt, RequestOptions]:
        """Return what several texts go on from: the prompt of a chat, with its options, or a prompt as it is."""
        if is_chat(prompt):
            return self.chat_prompt(prompt, cancel, think, options)
        if think is not None:
            raise RequestError(f"{argument('think')} is for chats, and the prompt is none; leave it out")
        return cast(Prompt, prompt), options


def is_chat(prompt: Prompt | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt is the messages of a chat."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _methods(options: RequestOptions) -> dict[str, object]:
    """Take the methods of texts out of a request's options; return their values by name, edgedec's own among them."""
    methods = dict(options.pop("methods", {}))
    if (predicate := options.pop("predicate", None)) is not None:
        methods["predicate"] = predicate
    if (close := options.pop("json_close", False)) is not False:
        methods["json_close"] = close
    if (futures := options.pop("futures", None)) is not None:
        methods["futures"] = futures
    return methods
