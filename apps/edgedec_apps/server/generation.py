"""From what was asked to an iterator of pieces: the one place that runs the engine for the server.

A request may ask for several texts (several prompts, n of each); they are generated one after the other. Text k of a
prompt is drawn with seed + k, so that the first is the one that the seed gives alone.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgedec.api.engine import Engine
from edgedec.api.request_options import Reuse
from edgedec.decoding.prompt_length import require_may_fit
from edgedec.noise import SEED_LIMIT
from edgedec.progress import CancelToken
from edgedec.sequence import COUPLED, Generation, TokenOutput
from edgedec.stats import DecodeStats
from edgedec_apps.server.room import Share
from edgedec_apps.server.tools import Tools

_TOKENIZER_BYTES = 96  # for each byte of the longest word, as measured
_WORD = re.compile(r"\s+|\S+")

Prompt = str | tuple[int, ...] | list[dict[str, Any]]
"""Text to continue, token ids to continue, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for.

    Attributes:
        prompts: What to continue or answer.
        options: Further options of Engine.stream: of sampling, where what is not given is left to the model's defaults,
            and of structured output.
        n: Texts for each prompt.
        reuse: How much of the KV cache of earlier requests is used; "exact" leaves a cold start's text.
        draft: Whether drafts may be verified.
        verify: By which rule.
        tools: What the model may call.
    """

    prompts: tuple[Prompt, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    reuse: Reuse = "exact"
    draft: bool = True
    verify: str = COUPLED
    tools: Tools = ()

    @property
    def tool_names(self) -> frozenset[str] | None:
        """The names that a call may have; None where there are no tools."""
        return frozenset(tool["function"]["name"] for tool in self.tools) if self.tools else None


@dataclass(frozen=True, slots=True)
class Counts:
    """How far a text is: tokens generated, and of the drafts verified so far the tokens and those accepted."""

    n_generated: int
    n_drafted: int
    n_accepted: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of text `index`, and how far the text is."""

    index: int
    output: TokenOutput
    counts: Counts


@dataclass(frozen=True, slots=True)
class Finished:
    """Text `index` is complete."""

    index: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Begun:
    """The request got its place, after so many seconds."""

    queued_s: float


Event = Begun | Piece | Finished


async def read_prompts(engine: Engine, asked: Asked, share: Share, cancel: CancelToken) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt: a chat by the model's template, a text as it is.

    That is done in threads, before the request has its place: a client that leaves meanwhile holds up nobody. Where the
    task that waits is cancelled, `cancel` is as well, which ends the rendering.

    Raises:
        EdgedecError: As Engine.stream.
        ApiError: There is no room for the tokenizer's work.
    """
    found: list[tuple[int, ...]] = []
    for prompt in asked.prompts:
        if isinstance(prompt, tuple):
            found.append(prompt)
            continue
        try:
            text = await asyncio.to_thread(_as_text, engine, prompt, asked.tools, cancel)
        except asyncio.CancelledError:
            cancel.cancel()
            raise
        encode: Callable[[str], Sequence[int]] = engine.prompt_ids if isinstance(prompt, str) else engine.rendered_ids
        async with share.more(_TOKENIZER_BYTES * await asyncio.to_thread(_longest_word_bytes, text)):
            found.append(tuple(await asyncio.to_thread(encode, text)))
    return found


def _longest_word_bytes(text: str) -> int:
    """Return the size of the longest part of a text that a tokenizer may take as one word."""
    return max((len(word[0]) for word in _WORD.finditer(text)), default=0) * (1 if text.isascii() else 3)


def _as_text(engine: Engine, prompt: str | list[dict[str, Any]], tools: Tools, cancel: CancelToken) -> str:
    """Return a prompt as the text to tokenize (PromptTooLongError where it certainly does not fit)."""
    text = prompt if isinstance(prompt, str) else engine.render(prompt, tools=tools or None, cancel=cancel)
    require_may_fit(engine.tokenizer, text, engine.n_prompt_max)
    return text


def events(engine: Engine, asked: Asked, prompts: Sequence[tuple[int, ...]], cancel: CancelToken) -> Iterator[Event]:
    """Generate what is asked for, in this thread; ends after the text in which `cancel` came.

    `prompts` are what read_prompts returned.

    Raises:
        EdgedecError: As Engine.stream.
    """
    index = 0
    for token_ids in prompts:
        for k in range(asked.n):
            yield from _one(engine, asked, token_ids, k, index, cancel)
            if cancel.cancelled:
                return
            index += 1


def _one(
    engine: Engine, asked: Asked, token_ids: tuple[int, ...], k: int, index: int, cancel: CancelToken
) -> Iterator[Event]:
    options = dict(asked.options)
    if options.get("seed") is not None:
        options["seed"] = (options["seed"] + k) % SEED_LIMIT
    stream = engine.stream(
        token_ids,
        reuse=asked.reuse,
        draft=asked.draft,
        verify=asked.verify,
        cancel=cancel,
        **options,
    )
    stats: DecodeStats = stream.generation.stats
    try:
        for n, output in enumerate(stream, 1):
            yield Piece(index, output, Counts(n, stats.n_draft_tokens, stats.n_accepted_tokens))
    finally:
        stream.close()
    yield Finished(index, stream.generation)


async def run_in_thread(make: Callable[[], Iterator[Event]], put: Callable[[Event], None], cancel: CancelToken) -> None:
    """Run an iterator in a thread and hand what it yields to `put`, in the event loop; return when the thread ends.

    When the task is cancelled, `cancel` ends the iterator, and the task goes on to wait for that: only then is the
    engine free.

    Raises:
        Exception: What the iterator raises.
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
            for event in make():
                hand(put, event)
        except (
            BaseException
        ) as error:  # a library's may be no Exception (a panic of Rust code); nothing may leave us waiting
            hand(ended.set_exception, error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            hand(ended.set_result, None)

    threading.Thread(target=work, name="edgedec-request", daemon=True).start()
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        cancel.cancel()
        await asyncio.wait({ended})
        if ended.exception() is None:
            raise
        raise asyncio.CancelledError from ended.exception()
