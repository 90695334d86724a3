"""From what a caller gives, a prompt or a chat with options, to a request that can be generated."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal, TypedDict, cast

import numpy as np

from edgedec.chat import Message, drop_oldest_turns
from edgedec.constraint import OpenConstraint
from edgedec.control_tokens import SaidTemplate
from edgedec.decoding.grammars import Grammars
from edgedec.decoding.prompt_length import CUT_TEXT, count_tokens, encode_prompt, require_messages
from edgedec.decoding.session_pool import SessionSlot
from edgedec.errors import OptionError, PromptTooLongError, RequestError, counted
from edgedec.grammar import Grammar, JsonSchema, Predicate, chosen_grammar
from edgedec.model import Model, writes_texts
from edgedec.pictures import PictureReader, Pictures
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sequence import COUPLED, Request
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


def adapter_scales(given: Sequence[float], n: int) -> tuple[float, ...]:
    """Return the scales of `n` adapters, each as a float32 (OptionError unless they are so many finite numbers)."""
    try:
        with np.errstate(over="ignore"):
            scales = tuple(map(float, np.array(given, np.float32).tolist()))
        if len(scales) == n and all(map(math.isfinite, scales)):
            return scales
    except (TypeError, ValueError):
        pass
    raise OptionError("lora", given, f"it must be {counted(n, 'number')}, one for each adapter of the model")


def as_token_ids(ids: Sequence[int], name: str = "prompt") -> tuple[int, ...]:
    """Return the token ids that an argument holds (OptionError unless all are whole numbers)."""
    try:
        return tuple(map(index, ids))
    except TypeError:
        raise OptionError(name, ids, "it must be a sequence of token ids, or where it is text, one string") from None


@dataclass(frozen=True, slots=True)
class ChatPrompts:
    """Makes prompts from a model's chats.

    Attributes:
        template: The model's chat template.
        tokenizer: The model's tokenizer.
        n_most: Most tokens of a prompt.
        n_trained: Tokens of context that the model was trained for; 0 where that is not known.
        pictures: Makes ids of pictures, or None.
    """

    template: SaidTemplate
    tokenizer: Tokenizer
    n_most: int
    n_trained: int = 0
    pictures: PictureReader | None = None

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

    def ids(self, text: str, pictures: Sequence[Any] = ()) -> list[int]:
        """Return the token ids of a rendered prompt (PromptTooLongError where they are more than `self.n_most`)."""
        if pictures and self.pictures is not None:
            return self.pictures.ids(self.tokenizer, text, pictures, self.n_most)
        return encode_prompt(self.tokenizer, text, self.n_most, self.n_trained, parse_special=True)

    def fit(
        self,
        messages: Sequence[Message],
        n_most: int,
        tools: Sequence[Mapping[str, object]] | None = None,
        pictures: Sequence[Any] = (),
    ) -> tuple[list[Message], int]:
        """Return the messages without the oldest turns, so that the prompt has at most `n_most` tokens.

        Also return how many messages are left out.
        """

        def count(kept: Sequence[Message]) -> int:
            text = self.template.render(kept, add_generation_prompt=True, tools=tools)
            if pictures:
                try:
                    there = [picture for picture in pictures if picture.marker in text]
                    return len(replace(self, n_most=n_most).ids(text, there))
                except PromptTooLongError:
                    return n_most + 1
            return count_tokens(self.tokenizer, text, n_most)

        return drop_oldest_turns(messages, count, n_most)


class Requests:
    """Makes the requests for one loaded model.

    Args:
        model: The model.
        slot: One of its sessions, which says how long a text may be.
        grammars: The grammars that were compiled for it.
        scales: Those of the model's adapters, for requests that name none.
    """

    def __init__(self, model: Model, slot: SessionSlot, grammars: Grammars, scales: tuple[float, ...] = ()) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._slot = slot
        self._grammars = grammars
        self.scales = scales

    @property
    def n_prompt_max(self) -> int:
        """Most tokens of a prompt: those of a text, of which a model that writes needs the last one."""
        return self._slot.session.n_ctx - writes_texts(self._model)

    def sampling(self, options: SamplingOptions) -> SamplingParams:
        """Return sampling parameters: the options given, then the model's own defaults, then edgedec's.

        Raises:
            RequestError: An option is out of range.
        """
        own = SamplingParams(**self._model.card.sampling_defaults)
        if "logit_bias" in options and own.logit_bias:  # what the model never writes, unless a caller says otherwise
            options = {**options, "logit_bias": {**own.logit_bias, **options["logit_bias"]}}
        return replace(own, **options)

    def wanted(self, prompt: Prompt, options: RequestOptions) -> tuple[Request, OpenConstraint]:
        """Return the request that options stand for, and what opens the grammar of a text of it."""
        reuse, draft, rule = options.pop("reuse", "exact"), options.pop("draft", True), options.pop("verify", COUPLED)
        grammar = chosen_grammar(options.pop("grammar", None), options.pop("json_schema", None))
        methods = _methods(options)
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
        return request, lambda: self._grammars.open(grammar, request)

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

    def plain(self, prompt: Prompt, options: SamplingOptions) -> Request:
        """Return the plain request for a prompt, with a seed drawn where none is given."""
        self.require_writer()
        token_ids, sampling = self.prompt_ids(prompt), self.sampling(options)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return Request(token_ids, sampling, seed, scales=self.scales)

    def require_writer(self) -> None:
        """Raise RequestError for a model that was trained to embed or rank texts."""
        if not writes_texts(self._model):
            raise RequestError(
                f"{self._model.card.name!r} is an embedding model or reranker: use embed() or rank(), or load one "
                "that writes texts"
            )

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
