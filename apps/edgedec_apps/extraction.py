"""Extraction: the stretches of a passage that most probably answer a question, found exactly, with probabilities.

A quotation is the model's whole answer; span_search.py has the search, which evaluates a small part of all quotations.

Paper: exact-extract, Castel et al. 2021, arXiv:2108.05857, with a bound that leaves most spans unscored
Option: `edgedec extract MODEL QUESTION`
For: quotations that are certain to stand in the text
Measured: of 60 questions about made messages the 135M's most probable span answers 11, its greedy text none, p = 0.001
    (`python benchmarks/answers/greedy_spans.py smollm2-135m --tasks 15`); 0.15 to 0.9 s after the prompt for a passage
    of 180 tokens, where scoring every span takes 35 s (`speed/extract`, program at 832b325c)
Status: opt-in
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgedec.api.engine import Engine
from edgedec.callers import checks_arguments, one_line
from edgedec.decoding.prompt_length import too_long
from edgedec.decoding.reading import PromptRead, prompt_read
from edgedec.errors import CancelledError, CapabilityError, OptionError, RequestError
from edgedec.progress import CancelToken, OnProgress
from edgedec.tokenizer import Tokenizer
from edgedec_apps.span_search import SpanSearch, Start, starts_of

MOST_SPANS = 100
"""Most quotations of a passage that are asked for at a time."""
MOST_SPAN_TOKENS = 512
"""Most tokens of a quotation."""
BETWEEN = "\n\n"
"""What stands between two passages that are no stretch of one text."""
INSTRUCTION = "Answer the question with the exact words of the text above, and nothing else."


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a passage: a quotation that answers a question.

    Attributes:
        start, end: The positions in the passage of its first character and of the character behind its last one. Where
            the same text stands several times, these are those of its first place.
        logprob: The log-probability that the model answers with this and ends.
    """

    text: str
    start: int
    end: int
    logprob: float
    token_ids: tuple[int, ...]

    __repr__ = one_line

    @property
    def probability(self) -> float:
        """exp(logprob)."""
        return math.exp(self.logprob)


@dataclass(frozen=True, slots=True)
class Extraction:
    """The most probable quotations of a passage, and what finding them took.

    Attributes:
        spans: The quotations, the most probable first. There are fewer than wanted where the passage has fewer.
        n_prompt_tokens: Tokens of the prompt: the passage, the question and the instruction.
        n_reused_tokens: Tokens of the prompt that the KV cache held already.
        n_starts: Places of the passage where a span may begin.
        n_span_tokens: Tokens of the longest spans from all these places: the rows that scoring every span would take.
        n_forwards: Forwards after the prompt's.
        n_rows: Their rows.
        prompt_s: Seconds until the prompt was read.
        total_s: Seconds of everything.
    """

    spans: tuple[Span, ...]
    n_prompt_tokens: int
    n_reused_tokens: int
    n_starts: int
    n_span_tokens: int
    n_forwards: int
    n_rows: int
    prompt_s: float
    total_s: float

    __repr__ = one_line


def question_text(question: str, passage: str) -> str:
    """Return what a model is asked: the passage first, so that its KV cache serves further questions.

    Raises:
        RequestError: One of the two is no text, or empty.
    """
    for name, text in (("question", question), ("passage", passage)):
        if not isinstance(text, str) or not text.strip():
            raise RequestError(f"the {name} is empty or no text; give a str with at least one character")
    return f"{passage}\n\n{INSTRUCTION}\nQuestion: {question.strip()}"


@dataclass(frozen=True, slots=True)
class WantedSpans:
    """What is looked for.

    Attributes:
        passages: The texts that are quoted; no quotation goes from one to the next.
        prompt_ids: What the model reads before it answers.
        lead: What stands before a quotation in the model's text.
        n: How many quotations.
        max_tokens: Most tokens of one.
    """

    passages: tuple[str, ...]
    prompt_ids: tuple[int, ...]
    lead: str
    n: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name, most in (("n", MOST_SPANS), ("max_tokens", MOST_SPAN_TOKENS)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise OptionError(name, value, f"it must be a whole number from 1 to {most}")


@checks_arguments
def extract(
    engine: Engine,
    question: str,
    passage: str | Sequence[str],
    *,
    n: int = 3,
    max_tokens: int = 64,
    cancel: CancelToken | None = None,
    on_progress: OnProgress | None = None,
) -> Extraction:
    """Return the stretches of a passage that the model most probably answers a question with, found exactly.

    A stretch begins and ends where one of its tokens does. Its probability is that of its tokens followed by the
    end of the answer, at temperature 1; so those of all stretches sum to at most 1, and a low sum says that the
    model would answer in other words.

    Args:
        question: What to look for.
        passage: The text to quote from. Of several, no quotation goes from one to the next, and places count in
            these texts with two line ends between them.
        n: How many stretches, 1 to 100.
        max_tokens: Most tokens of a stretch, 1 to 512.
        cancel: Stops the work, from any thread.
        on_progress: Called while the prompt is read.

    Raises:
        RequestError: The question or the passage is empty, or a number is out of range.
        PromptTooLongError: Passage and question with `max_tokens` do not fit the context.
        CapabilityError: The runtime can't go back in a text, or the model has no end token.
        CancelledError: `cancel` stopped the work.
    """
    passages: tuple[str, ...] = (passage,) if isinstance(passage, str) else tuple(passage or ())
    for each in passages:
        question_text(question, each)
    text, cancel = question_text(question, BETWEEN.join(passages)), CancelToken() if cancel is None else cancel
    if engine.template is not None:
        prompt_ids, lead = tuple(engine.chat_ids([{"role": "user", "content": text}], cancel=cancel)), ""
    else:
        prompt_ids, lead = engine.prompt_ids(f"{text}\nAnswer:", as_said=True), " "
    spans = WantedSpans(passages, prompt_ids, lead, n, max_tokens)
    tokenizer = engine.tokenizer
    engine.model.capabilities.require("rollback", engine.card.runtime)
    end_ids = [i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i)]
    if not end_ids:
        raise CapabilityError("the model has no end token, so no answer of it has an end; use another model")
    began = perf_counter()
    starts = _starts(tokenizer, spans, engine.n_ctx)
    if cancel.cancelled:
        raise CancelledError("the extraction was cancelled")
    with prompt_read(engine.pool, engine.requests.plain(prompt_ids, {}), cancel, on_progress) as prompt:
        return _searched(prompt, spans, starts, np.array(end_ids, np.int64), began, cancel)


def _starts(tokenizer: Tokenizer, spans: WantedSpans, n_ctx: int) -> list[Start]:
    """Return the places where quotations begin.

    Raises:
        PromptTooLongError: The prompt leaves no room in the context.
        OptionError: The prompt leaves less room than the longest quotation takes.
        CapabilityError: The tokenizer does not keep the passage's text.
    """
    room = n_ctx - len(spans.prompt_ids)
    if room < 1:
        raise too_long(len(spans.prompt_ids), n_ctx - 1)
    starts, base = list[Start](), 0
    for passage in spans.passages:
        starts += starts_of(tokenizer, passage, spans.lead, spans.max_tokens, base)
        base += len(f"{passage}{BETWEEN}".encode())
    if not starts:
        raise CapabilityError("the model's tokenizer does not keep the text of the passage, so nothing can be quoted")
    if max(len(start.token_ids) for start in starts) > room:
        why = f"the context of {n_ctx} tokens has no more room behind the passage and the question"
        raise OptionError("max_tokens", spans.max_tokens, f"it must be at most {room}: {why}")
    return starts


def _searched(
    prompt: PromptRead,
    spans_of: WantedSpans,
    starts: list[Start],
    end_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
    began: float,
    cancel: CancelToken,
) -> Extraction:
    """Search behind the prompt."""
    read, n_prompt = perf_counter(), len(spans_of.prompt_ids)
    search = SpanSearch(prompt.slot.session, n_prompt, end_ids, spans_of.n, prompt.slot.text_rows, cancel)
    best = search.run(starts, prompt.forward.logits[0], prompt.forward.ops)
    passage = BETWEEN.join(spans_of.passages)
    data = passage.encode()
    spans = []
    for logprob, node in best:
        first, end = len(data[: node.starts[0].at].decode()), len(data[: node.end].decode())
        ids = tuple(each.token for each in node.path())
        spans.append(Span(passage[first:end], first, end, logprob, ids))
    return Extraction(
        tuple(spans),
        n_prompt_tokens=n_prompt,
        n_reused_tokens=prompt.n_reused,
        n_starts=len(starts),
        n_span_tokens=sum(len(start.token_ids) for start in starts),
        n_forwards=search.n_forwards,
        n_rows=search.n_rows,
        prompt_s=read - began,
        total_s=perf_counter() - began,
    )
