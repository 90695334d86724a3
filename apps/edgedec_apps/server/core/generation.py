"""Generation of the texts of a request, piece by piece: the one place of the server that runs the engine.

A request may want several texts: several prompts, and n texts of each. The texts of one prompt are generated together,
the prompts one after the other. Text k of a prompt is drawn with seed + k, so that the first text is the one that the
seed gives alone.
"""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from edgedec.api.engine import Engine
from edgedec.api.requests import Reuse
from edgedec.decoding.text_room import require_room
from edgedec.errors import MemoryCapError
from edgedec.grammar import Grammar
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec.sampling import SEED_LIMIT, SamplingParams
from edgedec.sequence import COUPLED, Generation, TokenOutput
from edgedec.stats import DecodeStats
from edgedec.thought_marks import Thoughts
from edgedec_apps.call_grammar import bound_calls, may_bind
from edgedec_apps.choices import weigh
from edgedec_apps.infill import Gap
from edgedec_apps.reading_pace import ReadingPace
from edgedec_apps.refine import RefineBy, refined
from edgedec_apps.reply_marks import hidden_marks, marks_of, schemas_of
from edgedec_apps.server.core.chat_options import Tools
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.parts import Splitter

if TYPE_CHECKING:
    from edgedec_runtimes.pictures.reader import MarkedPicture

T = TypeVar("T")
Prompt = str | tuple[int, ...] | Gap | list[dict[str, Any]]
"""Text to continue, token ids to continue, a gap to fill, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """The texts that a request wants.

    Attributes:
        prompts: The prompts to continue or answer.
        options: Further options of Engine.stream, of sampling and of structured output; absent ones have the model's
            defaults.
        n: Number of texts for each prompt.
        reuse: How the KV cache of earlier requests is reused; with "exact" the text is that of a cold start.
        draft: Whether drafts are allowed.
        verify: The rule that verifies drafts.
        tools: The tools that the model may call.
        one_call: Whether the model may call only one of them in an answer.
        binds_calls: Whether its calls keep to the schemas of the tools, though it may as well call none.
        variables: Further variables of the chat template.
        thinks: Whether a text may begin with what the model thinks, which is a part of its own in the answer.
        best_of: How many texts are generated for each prompt where that is more than n; the n texts are then those of
            the highest mean log-probability of a token.
        refine: How the answer to a chat is checked and written again, or None.
    """

    prompts: tuple[Prompt, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    reuse: Reuse = "exact"
    draft: bool = True
    verify: str = COUPLED
    tools: Tools = ()
    one_call: bool = False
    binds_calls: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = False
    best_of: int = 1
    refine: RefineBy | None = None

    def splitter(self, engine: Engine) -> Splitter:
        """Return what splits the texts of a model into their parts."""
        tools = schemas_of(self.tools) if self.tools else None
        if engine.template is None:
            return Splitter(tools, self.thinks, self.one_call)
        marks = marks_of(engine.template.source, engine.tokenizer)
        if {"grammar", "json_schema"} & self.options.keys():  # thoughts come first, or not at all
            marks = tuple(
                replace(mark, only_first=True) if mark.kind == "thinking" and not mark.head_ends else mark
                for mark in marks
            )
        return Splitter(tools, self.thinks, self.one_call, marks, hidden_marks(marks, engine.tokenizer))


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt that can be evaluated.

    Attributes:
        token_ids: The tokens, and negative ids for rows of pictures.
        opened: The mark with which a chat's prompt ends, so that the text begins behind it; empty for none.
        pictures: Its pictures, which are encoded when its turn has come.
        thoughts: What a text may think before it keeps to its grammar; None for nothing.
    """

    token_ids: tuple[int, ...]
    opened: str = ""
    pictures: "tuple[MarkedPicture, ...]" = ()
    thoughts: Thoughts | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of text `index`, and of the text so far: its tokens, those of verified drafts, and accepted ones."""

    index: int
    output: TokenOutput
    n_generated: int
    n_drafted: int
    n_accepted: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Text `index` is complete; where it was chosen among some, `choices` has the probability of each."""

    index: int
    generation: Generation
    choices: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begun:
    """The request can't be refused any more: its texts will come, or fail.

    Attributes:
        n_prompt_tokens: Number of tokens of all prompts together.
        opened: By text, the mark with which its prompt ends, such as `<think>`; empty for none.
    """

    n_prompt_tokens: int
    opened: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """The texts of a prompt are open: their pictures are encoded, and their grammar is compiled."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a prompt is read.

    Attributes:
        index: The first text of the prompt.
        n_prompt: Tokens of the prompt.
        n_reused: Those that an earlier request has read.
        n_read: Those that are read by now, with these.
        seconds: The time that the reading has taken.
        left_s: The seconds that the rest will take; None where that is not known yet.
    """

    index: int
    n_prompt: int
    n_reused: int
    n_read: int
    seconds: float
    left_s: float | None


Event = Begun | Opened | Reading | Piece | Finished
Tell = Callable[[Event], None]
_CHECKED_EARLY = {*SamplingParams.names(), "lora"}  # options whose check takes neither time nor memory


def events(
    engine: Engine, request: TextRequest, prompts: Sequence[Encoded], cancel: CancelToken, tell: Tell | None = None
) -> Iterator[Event]:
    """Generate the texts of a request in this thread; stop after the text in which `cancel` comes.

    `prompts` are the request's prompts; `tell` is called with each Reading of them, or is None.

    Raises:
        EdgedecError: As Engine.stream.
    """
    bound: dict[str, Any] = {}
    if request.binds_calls and may_bind(request.options):
        grammar = bound_calls(engine, request.tools, request.options.get("json_schema"))
        bound = {} if grammar is None else {"grammar": grammar, "json_schema": None}
    for index, prompt in enumerate(prompts):
        first = index * request.n
        options: dict[str, Any] = {
            **request.options,
            **bound,
            "pictures": engine.requests.picture_rows(prompt.pictures, cancel=cancel),
            "thoughts": prompt.thoughts,
            "reuse": request.reuse,
            "draft": request.draft,
            "verify": request.verify,
            "cancel": cancel,
        }
        if tell is not None:
            options["on_progress"] = _reporting(first, tell)
        choices = options.pop("choices", ())
        if choices and prompt.thoughts is None and request.refine is None and request.best_of <= request.n:
            yield from _choosing(engine, request, prompt, first, options, choices)
        elif request.refine is not None:
            yield _refined(engine, request, request.refine, options)
        elif max(request.n, request.best_of) > 1:
            yield from _several(engine, request, prompt, first, options)
        else:
            yield from _one(engine, prompt, first, options)
        if cancel.cancelled:
            return


def is_taken(engine: Engine, request: TextRequest, prompts: Sequence[Encoded]) -> bool:
    """Refuse what can be refused before its turn; return whether nothing can refuse the request later.

    Grammars, predictions and pictures take memory, which the plan has for requests in their turn alone.

    Raises:
        EdgedecError: As Engine.stream, or the memory plan has no room for the texts of a prompt.
    """
    _require_room(engine, request, prompts)
    plain: dict[str, Any] = {name: value for name, value in request.options.items() if name in _CHECKED_EARLY}
    readable = [prompt for prompt in prompts if not prompt.pictures]
    for prompt in readable:
        engine.stream(prompt.token_ids, **plain).close()
    return plain.keys() == request.options.keys() and len(readable) == len(prompts)


def _require_room(engine: Engine, request: TextRequest, prompts: Sequence[Encoded]) -> None:
    """Raise ApiError 400 where the memory plan has no room for the texts of a prompt, each of them to its end."""
    n = max(request.n, request.best_of, 0 if request.refine is None else request.refine.n)
    for prompt in prompts if n > 1 else ():
        try:
            require_room(engine.pool.slots[0], n, len(prompt.token_ids), request.options.get("max_tokens"))
        except MemoryCapError as error:
            name = "n" if n == request.n else "refine" if request.refine else "best_of"
            raise ApiError(f"{name}: {error.naming({'n_texts': '--texts'})}", code="no_room", param=name) from error


def _reporting(index: int, tell: Tell) -> OnProgress:
    """Return what takes the progress of a prompt, and tells it as Readings."""
    pace, reports = ReadingPace(), list[tuple[int, float]]()

    def report(progress: Progress) -> None:
        if progress.phase != "prefill" or not progress.total:
            return
        now = perf_counter()
        reports.append((progress.done, now))
        pace.add(progress.done, now)
        n_reused, began = reports[0]
        left_s = pace.left_s(progress.total)
        tell(Reading(index, progress.total, n_reused, progress.done, now - began, left_s))

    return report


def _several(
    engine: Engine, request: TextRequest, prompt: Encoded, first: int, options: dict[str, Any]
) -> Iterator[Event]:
    """Generate several texts of one prompt together. The texts are numbered from `first` on.

    Where that are more than the request's n, the n whose tokens are the most probable on average are finished.
    """
    n, n_read = max(request.n, request.best_of), [0] * request.n
    if n == request.n:
        options.setdefault("logprobs", None)  # which takes time where nobody asks for it
    open_texts = list(range(request.n))
    with closing(engine.samples_stream(prompt.token_ids, n, **options)) as stream:
        yield Opened()
        for output in stream:
            if n > request.n:
                continue
            k = output.text
            n_read[k] += 1
            stats = stream.stats(k)
            yield Piece(first + k, output.output, n_read[k], stats.n_draft_tokens, stats.n_accepted_tokens)
            for k in [k for k in open_texts if stream.has_ended(k)]:
                open_texts.remove(k)
                yield Finished(first + k, stream.generations[k])
    texts = stream.generations if n == request.n else sorted(stream.generations, key=_mean_logprob, reverse=True)
    for k in open_texts:
        yield Finished(first + k, texts[k])


def _refined(engine: Engine, request: TextRequest, how: RefineBy, options: dict[str, Any]) -> Event:
    """Refine the answer to a chat and finish the best text, whose reasons say what the check said of each.

    Raises:
        ApiError: The chat has pictures.
    """
    (messages,) = request.prompts
    assert isinstance(messages, list)
    if options.pop("pictures"):
        raise ApiError("refine and pictures exclude each other; leave one out", param="refine")
    result = refined(engine, messages, how, **options)
    stats = result.generation.stats
    stats.add_note(f"refined: text {result.place + 1} of {len(result.texts)}: {result.why}")
    stats.explanation += result.lines()
    return Finished(0, result.generation)


def _choosing(
    engine: Engine, request: TextRequest, prompt: Encoded, first: int, options: dict[str, Any], choices: Sequence[str]
) -> Iterator[Event]:
    """Generate texts, each drawn as a whole among choices by their exact probabilities."""
    cancel, on_progress = options["cancel"], options.pop("on_progress", None)
    asked: Any = {name: value for name, value in options.items() if name != "cancel"}
    plain, _ = engine.requests.prepared(prompt.token_ids, asked)
    weighed = weigh(engine, plain, choices, cancel, on_progress)
    for k in range(request.n):
        seed = (plain.seed + k) % SEED_LIMIT
        text = weighed.drawn(plain.sampling.temperature, seed).text
        options |= {"grammar": Grammar.regex(re.escape(text)), "seed": seed}
        for event in _one(engine, prompt, first + k, options):
            if isinstance(event, Finished):
                event = replace(event, choices={each.text: each.probability for each in weighed.ranked})
                if k == 0:  # for it the prompt was read
                    stats, before_s = event.generation.stats, weighed.total_s
                    stats.n_reused_tokens, stats.prefill_s = weighed.n_reused_tokens, stats.prefill_s + before_s
                    stats.first_token_s, stats.total_s = stats.first_token_s + before_s, stats.total_s + before_s
            yield event


def _mean_logprob(generation: Generation) -> float:
    """Return the mean log-probability of a text's tokens; a text without a token comes last."""
    n = len(generation.token_ids)
    return (generation.logprob_sum or 0.0) / n if n else -inf


def _one(engine: Engine, prompt: Encoded, index: int, options: dict[str, Any]) -> Iterator[Event]:
    stream = engine.stream(prompt.token_ids, **options)
    stats: DecodeStats = stream.generation.stats
    try:
        yield Opened()
        for n, output in enumerate(stream, 1):
            yield Piece(index, output, n, stats.n_draft_tokens, stats.n_accepted_tokens)
    finally:
        stream.close()
    yield Finished(index, stream.generation)


async def run_in_thread(
    make: Callable[[Callable[[T], None]], Iterator[T]], put: Callable[[T], None], cancel: CancelToken
) -> None:
    """Run an iterator in a thread, and call `put` in the event loop with each item; return when the thread ends.

    `make` returns the iterator; it gets a function that calls `put` so, too, in the middle of an item.

    When the task is cancelled, `cancel` ends the iterator, and the task still waits for that end: only then is the
    engine free.

    Raises:
        Exception: As the iterator.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def hand(function: Callable[..., None], *values: Any) -> None:
        try:
            loop.call_soon_threadsafe(function, *values)
        except RuntimeError:  # the loop is closed: nobody reads any more
            cancel.cancel()

    def work() -> None:
        try:
            for event in make(lambda event: hand(put, event)):
                hand(put, event)
        except BaseException as error:  # a panic of Rust code is not an Exception, and the task must not wait forever
            hand(ended.set_exception, error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            hand(ended.set_result, None)

    threading.Thread(target=work, name="edgedec-request", daemon=True).start()
    await to_its_end(ended, cancel.cancel)


async def to_its_end(thread: Awaitable[T], cancel: Callable[[], None]) -> T:
    """Return the result of work in a thread; where the task is cancelled, `cancel` is called, and its end waited for.

    Until its end a thread needs what the task gives back then: the model, and memory.

    Raises:
        Exception: As the work.
    """
    work, cancelled = asyncio.ensure_future(thread), False
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True
            cancel()
    if cancelled:
        raise asyncio.CancelledError from work.exception()
    return work.result()
