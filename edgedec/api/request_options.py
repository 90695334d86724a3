"""The options of a request: how tokens are drawn, and how a text is generated."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Literal, TypedDict

from edgedec.errors import OptionError, RequestError
from edgedec.grammar import Grammar, JsonSchema, Predicate
from edgedec.progress import OnProgress
from edgedec.sequence import COUPLED
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
        reuse: How much of the KV cache of earlier requests is used: "exact" (the default) only what has the bits of a
            cold start, "longest" all that the prompts share. A chat's default is "longest".
        draft: Whether drafts may be verified (the default); the text is the same either way.
        verify: The rule by which drafts are verified: "coupled" (the default) keeps the text; "tokenwise", "block",
            "recursive", "kseq" and "multipath" give a text of the same distribution.
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
        on_progress: Called while the prompt is read; by samples() and best() also while texts are written.
    """

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
    ids = as_token_ids(prediction or ())[:most]
    if not all(0 <= token_id < tokenizer.n_vocab for token_id in ids):
        raise RequestError(f"the prediction holds a token id outside the vocabulary of {tokenizer.n_vocab}")
    return ids


def as_token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return a prompt's token ids (RequestError unless it is a sequence of whole numbers; bytes are refused)."""
    try:
        if not isinstance(prompt, bytes | bytearray):
            return tuple(map(index, prompt))
    except TypeError:
        pass
    raise RequestError(f"a prompt must be a string or a sequence of token ids, found {type(prompt).__name__}")
