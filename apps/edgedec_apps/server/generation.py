"""Generation of the texts of a request, piece by piece: the one place of the server that runs the engine.

A request may want several texts: several prompts, and n texts of each. They are generated one after the other. Text k
of a prompt is drawn with seed + k, so that the first text is the one that the seed gives alone.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgedec.api.engine import Engine
from edgedec.api.request_options import Reuse
from edgedec.decoding.infill import Gap
from edgedec.noise import SEED_LIMIT
from edgedec.progress import CancelToken
from edgedec.sequence import COUPLED, Generation, TokenOutput
from edgedec.stats import DecodeStats
from edgedec_apps.server.parts import Splitter
from edgedec_apps.server.tools import Tools

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
        variables: Further variables of the chat template.
        thinks: Whether a text may begin with what the model thinks, which is a part of its own in the answer.
    """

    prompts: tuple[Prompt, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    reuse: Reuse = "exact"
    draft: bool = True
    verify: str = COUPLED
    tools: Tools = ()
    one_call: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = False

    def splitter(self) -> Splitter:
        """Return what splits the texts into their parts."""
        names = frozenset(tool["function"]["name"] for tool in self.tools) if self.tools else None
        return Splitter(names, self.thinks, self.one_call)


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a text so far: tokens generated, tokens of verified drafts, and accepted tokens of these."""

    n_generated: int
    n_drafted: int
    n_accepted: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of text `index`, and the counts of the text so far."""

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
    """The request left the queue, and its texts will come.

    Attributes:
        queued_s: Seconds that it waited.
        n_prompt_tokens: Number of tokens of all prompts together.
        opened: By text, whether its prompt ends within what the model thinks.
    """

    queued_s: float
    n_prompt_tokens: int
    opened: tuple[bool, ...]


Event = Begun | Piece | Finished


def events(
    engine: Engine, request: TextRequest, prompts: Sequence[tuple[int, ...]], cancel: CancelToken
) -> Iterator[Event]:
    """Generate the texts of a request in this thread; stop after the text in which `cancel` comes.

    `prompts` are the token ids of the request's prompts.

    Raises:
        EdgedecError: As Engine.stream.
    """
    index = 0
    for token_ids in prompts:
        for k in range(request.n):
            yield from _one(engine, request, token_ids, k, index, cancel)
            if cancel.cancelled:
                return
            index += 1


def _one(
    engine: Engine, request: TextRequest, token_ids: tuple[int, ...], k: int, index: int, cancel: CancelToken
) -> Iterator[Event]:
    options = dict(request.options)
    if options.get("seed") is not None:
        options["seed"] = (options["seed"] + k) % SEED_LIMIT
    stream = engine.stream(
        token_ids,
        reuse=request.reuse,
        draft=request.draft,
        verify=request.verify,
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
    """Run an iterator in a thread, and call `put` in the event loop with each item; return when the thread ends.

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
            for event in make():
                hand(put, event)
        except BaseException as error:  # a panic of Rust code is not an Exception, and the task must not wait forever
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
