"""Quotations of a passage that answer a question, with their probabilities."""

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgedec.decoding.extract import Span, SpanSearch
from edgedec.decoding.generate import SessionSlot
from edgedec.decoding.prompt_length import too_long
from edgedec.decoding.session_pool import SessionPool
from edgedec.decoding.spans import Start, starts_of
from edgedec.errors import CancelledError, CapabilityError, OptionError, RequestError, SessionError
from edgedec.progress import CancelToken, OnProgress
from edgedec.tokenizer import Tokenizer

MOST_SPANS = 100
MOST_SPAN_TOKENS = 512
INSTRUCTION = "Answer the question with the exact words of the text above, and nothing else."


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
class Wanted:
    """What is looked for.

    Attributes:
        passage: The text that is quoted.
        prompt_ids: What the model reads before it answers.
        lead: What stands before a quotation in the model's text.
        n: How many quotations.
        max_tokens: Most tokens of one.
    """

    passage: str
    prompt_ids: tuple[int, ...]
    lead: str
    n: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name, most in (("n", MOST_SPANS), ("max_tokens", MOST_SPAN_TOKENS)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise OptionError(name, value, f"it must be a whole number from 1 to {most}")


def extract(
    pool: SessionPool[SessionSlot], wanted: Wanted, cancel: CancelToken, on_progress: OnProgress | None
) -> Extraction:
    """Return the quotations (raises what Engine.extract raises)."""
    session = pool.slots[0].session
    capabilities, tokenizer = session.model.capabilities, session.model.tokenizer
    capabilities.require("rollback", session.model.card.runtime)
    end_ids = [i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i)]
    if not end_ids:
        raise CapabilityError("the model has no end token, so no answer of it has an end; use another model")
    began = perf_counter()
    starts = _starts(tokenizer, wanted, session.n_ctx)
    with pool.turn(cancel) as slot:
        if slot is not None:
            with cancel.calling(slot.session.cancel), slot.session.generating(len(wanted.prompt_ids)):
                if not cancel.cancelled:
                    return _searched(slot, wanted, starts, np.array(end_ids, np.int64), began, on_progress)
    raise CancelledError("the extraction was cancelled")


def _starts(tokenizer: Tokenizer, wanted: Wanted, n_ctx: int) -> list[Start]:
    """Return the places where quotations begin.

    Raises:
        PromptTooLongError: The prompt leaves no room in the context.
        OptionError: The prompt leaves less room than the longest quotation takes.
        CapabilityError: The tokenizer does not keep the passage's text.
    """
    room = n_ctx - len(wanted.prompt_ids)
    if room < 1:
        raise too_long(len(wanted.prompt_ids), n_ctx - 1)
    starts = starts_of(tokenizer, wanted.passage, wanted.lead, wanted.max_tokens)
    if not starts:
        raise CapabilityError("the model's tokenizer does not keep the text of the passage, so nothing can be quoted")
    if max(len(start.token_ids) for start in starts) > room:
        why = f"the context of {n_ctx} tokens has no more room behind the passage and the question"
        raise OptionError("max_tokens", wanted.max_tokens, f"it must be at most {room}: {why}")
    return starts


def _searched(
    slot: SessionSlot,
    wanted: Wanted,
    starts: list[Start],
    end_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
    began: float,
    on_progress: OnProgress | None,
) -> Extraction:
    """Read the prompt on a slot, and search."""
    if slot.closing:
        raise SessionError("the model is closed; load it again")
    session, prompt = slot.session, wanted.prompt_ids
    chunk, most = session.model.capabilities.prefill_chunk, min(slot.n_exact, len(prompt) - 1, session.n_cached)
    n_same = 0
    while n_same < min(most, len(slot.cached_ids)) and slot.cached_ids[n_same] == prompt[n_same]:
        n_same += 1
    n_same = n_same // chunk * chunk
    slot.cached_ids, slot.n_exact = list(prompt[:n_same]), n_same
    forward = session.forward(np.array(prompt[n_same:], np.int32), n_past=n_same, on_progress=on_progress)
    slot.cached_ids, slot.n_exact = list(prompt), len(prompt) // chunk * chunk
    read = perf_counter()
    search = SpanSearch(session, len(prompt), end_ids, wanted.n, slot.text_rows)
    found = search.run(starts, forward.logits[0], forward.ops)
    data = wanted.passage.encode()
    spans = []
    for logprob, node in found:
        first, end = len(data[: node.starts[0].at].decode()), len(data[: node.end].decode())
        ids = tuple(each.token for each in node.path())
        spans.append(Span(wanted.passage[first:end], first, end, logprob, ids))
    return Extraction(
        tuple(spans),
        n_prompt_tokens=len(prompt),
        n_reused_tokens=n_same,
        n_starts=len(starts),
        n_span_tokens=sum(len(start.token_ids) for start in starts),
        n_forwards=search.n_forwards,
        n_rows=search.n_rows,
        prompt_s=read - began,
        total_s=perf_counter() - began,
    )
