"""Choices: how probable each of some answers is, exactly, and which of them a model gives.

A choice is the model's whole answer: its weight is the probability of its tokens (as the tokenizer cuts the text by
itself), times that of an end behind them; so `yes` and `yes sir` are two answers. Choices are the spans of a search
(span_search.py) for all of them: what begins alike shares the nodes of a tree behind the prompt, and one forward has
all nodes, or as many as it takes.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgedec.api.engine import Engine
from edgedec.api.requests import Prompt, is_chat
from edgedec.callers import checks_arguments, one_line
from edgedec.chat import Message, thinking_variables
from edgedec.decoding.reading import prompt_read
from edgedec.errors import CapabilityError, ModelFormatError, OptionError, RequestError
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import Noise
from edgedec.sequence import Request
from edgedec_apps.span_search import SpanSearch, Start

MOST_CHOICES = 1000


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer to choose: its text and tokens, the log-probability of these with an end, and its share of all."""

    text: str
    token_ids: tuple[int, ...]
    logprob: float
    probability: float


@dataclass(frozen=True, slots=True)
class Choices:
    """How probable the choices are, and what weighing them took.

    Attributes:
        choices: In the order in which they were asked for; their probabilities sum to one.
        n_prompt_tokens: Tokens of the prompt.
        n_reused_tokens: Tokens of the prompt that the KV cache held already.
        n_forwards: Forwards after the prompt's.
        n_rows: Their rows.
        total_s: Seconds of everything.
    """

    choices: tuple[Choice, ...]
    n_prompt_tokens: int
    n_reused_tokens: int
    n_forwards: int
    n_rows: int
    total_s: float

    __repr__ = one_line

    @property
    def ranked(self) -> list[Choice]:
        """The choices, the most probable one first; equal ones in the order in which they were asked for."""
        return sorted(self.choices, key=lambda choice: -choice.logprob)

    @property
    def mass(self) -> float:
        """The probability that the model gives one of the choices; the rest is that of all other answers."""
        return math.fsum(math.exp(choice.logprob) for choice in self.choices)

    def drawn(self, temperature: float, seed: int) -> Choice:
        """Return the most probable choice at temperature 0, else one drawn from p^(1 / temperature)."""
        if temperature == 0:
            return self.ranked[0]
        keys = np.array([choice.logprob for choice in self.choices]) / temperature
        return self.choices[int(np.argmax(keys + Noise(seed).gumbel(0, np.arange(len(keys)))))]


@checks_arguments
def choose(
    engine: Engine,
    prompt: Prompt | Sequence[Message],
    choices: Sequence[str],
    *,
    cancel: CancelToken | None = None,
    on_progress: OnProgress | None = None,
) -> Choices:
    """Return the exact probability of each choice as the model's answer, at temperature 1 and without thoughts.

    Args:
        prompt: A text or token ids to continue, or the messages of a chat.
        choices: The answers to choose from, at most 1000.
        cancel: Stops the work, from any thread.
        on_progress: Called while the prompt is read.

    Raises:
        RequestError: A choice is empty, does not fit the context, or is the same as another one.
        PromptTooLongError, TemplateError: As Engine.samples.
        CapabilityError: The model has no end token, or can't answer without thoughts.
        CancelledError: `cancel` stopped the work.
    """
    think, cancel = None, cancel or CancelToken()
    if is_chat(prompt) and engine.template is not None:
        with suppress(RequestError):
            thinking_variables(engine.template, False)
            think = False
    continued, options = engine.requests.chat_or_prompt(prompt, cancel, think, {"reuse": "exact"})
    if options.pop("thoughts", None) is not None:
        raise CapabilityError("the model thinks before each answer, so no choice is all of it; use another model")
    return weigh(engine, engine.requests.prepared(continued, options)[0], choices, cancel, on_progress)


def weigh(
    engine: Engine, request: Request, texts: Sequence[str], cancel: CancelToken, on_progress: OnProgress | None = None
) -> Choices:
    """Return the probabilities of choices as the answer to the prompt of a request; raises as choose().

    A model whose state can't go back reads the prompt anew for each choice.
    """
    began, tokenizer, n_prompt = perf_counter(), engine.tokenizer, len(request.prompt_ids)
    ids = _ids(engine, texts, n_prompt)
    end_ids = np.array([i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i)], np.int64)
    if not len(end_ids):
        raise CapabilityError("the model has no end token, so no answer of it has an end; use another model")
    # A node has the end of its first start, so the shortest comes first.
    starts = [Start(0, each, [-1] * (len(each) - 1) + [0]) for each in sorted(ids, key=len)]
    logprobs, searches, n_reused = dict[tuple[int, ...], float](), list[SpanSearch](), list[int]()
    for group in [starts] if engine.model.capabilities.rollback else [[start] for start in starts]:
        with prompt_read(engine.pool, request, cancel, on_progress) as prompt:
            most, session = prompt.slot.text_rows, prompt.slot.session
            search = SpanSearch(session, n_prompt, end_ids, len(group), most, cancel, wants_all=True)
            best = search.run(group, prompt.forward.logits[0], prompt.forward.ops)
        logprobs |= {tuple(each.token for each in node.path()): logprob for logprob, node in best}
        searches, n_reused = [*searches, search], [*n_reused, prompt.n_reused]
    if len(logprobs) < len(ids):
        raise ModelFormatError(f"{engine.path}: a logit is not a number; the file is damaged: download it again")
    weights = np.array([logprobs[each] for each in ids])
    shares = np.exp(weights - weights.max())
    return Choices(
        tuple(map(Choice, texts, ids, weights.tolist(), (shares / shares.sum()).tolist())),
        n_prompt_tokens=n_prompt,
        n_reused_tokens=n_reused[0],
        n_forwards=sum(search.n_forwards for search in searches),
        n_rows=sum(search.n_rows for search in searches),
        total_s=perf_counter() - began,
    )


def require_choices(texts: Sequence[str]) -> None:
    """Raise OptionError unless there are 1 to 1000 texts, none of them empty or twice there."""
    if not 1 <= len(texts) <= MOST_CHOICES or not all(texts):
        raise OptionError("choices", texts, f"it must be 1 to {MOST_CHOICES} texts, none of them empty")
    if twice := [text for text in dict.fromkeys(texts) if texts.count(text) > 1]:
        raise OptionError("choices", texts, f"{twice[0]!r} stands there twice; leave one out")


def _ids(engine: Engine, texts: Sequence[str], n_prompt: int) -> list[tuple[int, ...]]:
    """Return the tokens of each choice (RequestError where they don't spell it, don't fit, or are another one's)."""
    require_choices(texts)
    room, by_ids = max(0, engine.n_ctx - n_prompt), dict[tuple[int, ...], str]()
    for text in texts:
        ids = tuple(engine.tokenizer.encode(text, add_special=False, most=room))
        if len(ids) > room:
            raise OptionError("choices", text, f"behind the prompt the context has room for {room} tokens; shorten it")
        if not ids or b"".join(map(engine.tokenizer.piece, ids)).lstrip() != text.encode().lstrip():
            raise OptionError("choices", text, "the model's tokenizer does not keep this text; change it")
        if ids in by_ids:
            raise OptionError("choices", text, f"it has the same tokens as {by_ids[ids]!r}; leave one out")
        by_ids[ids] = text
    return list(by_ids)
