"""A generated answer: its wait in the queue and its texts, in one piece or as a stream."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from edgedec.sequence import Generation
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.kept_answers import keep_answer
from edgedec_apps.server.core.answer import Answer, Job, sse
from edgedec_apps.server.core.errors import closing_error, problem_of
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import (
    Begun,
    Encoded,
    Event,
    Finished,
    Opened,
    Piece,
    Reading,
    Tell,
    TextRequest,
    events,
    is_taken,
    run_in_thread,
)
from edgedec_apps.server.core.parts import Splitter
from edgedec_apps.server.core.prompts import read_prompts
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.registry.names import Named

_COMMENT = b": the server is at work\n\n"  # which clients of server-sent events pass over


@dataclass(frozen=True, slots=True)
class Delivery:
    """How an answer is sent.

    Attributes:
        stream: As a stream; else in one piece.
        usage: With the token counts at the end of the stream.
        live: With the counts so far in every part of the stream.
        logprobs: With log-probabilities.
        echo: With the prompt before the text.
        progress: With how far the prompt is read, where it is a stream.
    """

    stream: bool = False
    usage: bool = False
    live: bool = False
    logprobs: bool = False
    echo: bool = False
    progress: bool = False


class Dialect(ABC):
    """The form of the answer to one request; what most forms of server-sent events do is done here.

    Args:
        texts: The texts that it wants; None where it only wants the model to be loaded.
        delivery: How the answer is sent.
    """

    media_type = "text/event-stream"
    """Media type of the stream."""

    def __init__(self, job: Job, texts: TextRequest | None, delivery: Delivery) -> None:
        self.texts, self.delivery = texts, delivery
        self.splitter = Splitter() if texts is None else texts.splitter(job.engine)
        self._model, self._tokenizer = job.requested.name, job.engine.tokenizer
        self.choices: dict[int, Mapping[str, float]] = {}  # by text, as in Finished

    def begun(self, begun: Begun) -> Iterable[bytes]:
        """Return what begins the stream, as soon as the request is taken: a comment."""
        return (_COMMENT,)

    def quiet(self) -> bytes:
        """Return what a stream sends while it has no news, so that no client or proxy gives up: a comment."""
        return _COMMENT

    def reading(self, reading: Reading) -> Iterable[bytes]:
        """Return what a report on the reading of a prompt adds to the stream."""
        return ()

    @abstractmethod
    def piece(self, piece: Piece) -> Iterable[bytes]:
        """Return what a token adds to the stream."""

    @abstractmethod
    def finished(self, finished: Finished, queued_s: float) -> Iterable[bytes]:
        """Return what the end of a text adds to the stream."""

    def end(self, generations: list[Generation]) -> Iterable[bytes]:
        """Return what ends the stream: nothing, where finished() has sent the last event."""
        return ()

    def failed(self, error: BaseException) -> bytes:
        """Return the last part of a stream that an error ends: OpenAI's form of it."""
        return sse(problem_of(error).openai())

    @abstractmethod
    def whole(self, generations: list[Generation], queued_s: float) -> Mapping[str, Any]:
        """Return the answer in one piece; without texts, to a request that only wants the model to be loaded."""


Read = Callable[[Job], Dialect]
"""Reads a request's fields once its model is there: the form of its answer, with the texts that it wants."""


def written(service: Service, model: Named, fields: Fields, read: Read) -> Answer:
    """Return the answer that a model writes; a text stops at its next step where the client disconnects."""

    async def respond(job: Job) -> Mapping[str, Any] | None:
        dialect = read(job)
        job.sender.media_type, job.sender.failed = dialect.media_type, dialect.failed
        if dialect.texts is None:
            return dialect.whole([], 0.0)
        return await _Writing(job, model.completed(dialect.texts), dialect).send()

    return Answer(service, model, fields, respond)


@dataclass(slots=True)
class _Writing:
    """The texts of a request, from their prompts to the answer, in a dialect.

    Attributes:
        texts: The texts that it wants.
        dialect: The form of the answer.
        queued_s: Seconds that the request has waited in the queue.
        news: What happened that the client was not told yet; None is the end.
    """

    job: Job
    texts: TextRequest
    dialect: Dialect
    queued_s: float = 0.0
    news: "asyncio.Queue[Event | None]" = field(default_factory=asyncio.Queue)

    async def send(self) -> Mapping[str, Any] | None:
        """Send the stream and return None, or return the answer in one piece.

        Place and model are free when the texts are complete, read or not.
        """
        sender, dialect, stream = self.job.sender, self.dialect, self.dialect.delivery.stream
        producer = asyncio.create_task(self._produce())
        producer.add_done_callback(lambda _: self.news.put_nowait(None))
        texts: dict[int, Generation] = {}
        going = True
        try:
            while going:
                news = await self._next_events()
                chunks = [] if news else [dialect.quiet()]
                for event in news:
                    if isinstance(event, Begun):
                        dialect.splitter.begin(event.opened)
                        if stream:
                            await sender.begin()
                    elif isinstance(event, Finished):
                        texts[event.index], dialect.choices[event.index] = event.generation, event.choices
                    if stream:
                        chunks.extend(self._shown(event))
                    going = event is not None
                # Only the end of the server stops a text here: a client that disconnected would not read an answer.
                if self.job.service.closing or any(text.finish_reason == "cancelled" for text in texts.values()):
                    raise closing_error()
                await sender.send(chunks)
            await producer
        finally:
            producer.cancel()
            await asyncio.wait({producer})
            if not producer.cancelled():
                producer.exception()  # raised above, or there is no client to answer
        generations = [texts[index] for index in sorted(texts)]
        if not stream:
            return dialect.whole(generations, self.queued_s)
        await sender.send(dialect.end(generations))
        await sender.finish()
        return None

    def _shown(self, event: Event | None) -> Iterable[bytes]:
        """Return what an event adds to the stream."""
        if isinstance(event, Begun):
            return self.dialect.begun(event)
        if isinstance(event, Reading):
            return self.dialect.reading(event)
        if isinstance(event, Piece):
            return self.dialect.piece(event)
        return self.dialect.finished(event, self.queued_s) if isinstance(event, Finished) else ()

    async def _next_events(self) -> list[Event | None]:
        """Return what happened, such as all tokens of a draft; nothing where a stream was silent for long enough."""
        try:
            async with asyncio.timeout(self.job.sender.quiet_left_s(self.job.service.settings.quiet_s)):
                happened = [await self.news.get()]
        except TimeoutError:
            return []
        while not self.news.empty():
            happened.append(self.news.get_nowait())
        return happened

    async def _produce(self) -> None:
        job, texts, delivery = self.job, self.texts, self.dialect.delivery
        try:
            with job.queue.preparing():
                prompts = await read_prompts(job, texts)
                taken = await job.in_thread(is_taken, job.engine, texts, prompts)
            opened = tuple(prompt.opened for prompt in prompts for _ in range(texts.n))
            begun = Begun(sum(len(prompt.token_ids) for prompt in prompts), opened)
            late = delivery.stream and not taken
            if not late:
                self.news.put_nowait(begun)
            async with job.queue.turn() as self.queued_s:
                job.service.metrics.count_waiting(self.queued_s)
                work = partial(self._counted, prompts, begun if late else None)
                await run_in_thread(work, self.news.put_nowait, job.cancel)
        finally:
            if not (delivery.logprobs or delivery.echo):  # for which the tokenizer is needed to the end
                job.reference.release()

    def _counted(self, prompts: list[Encoded], begun: Begun | None, tell: Tell) -> Iterator[Event]:
        """Generate and count the texts; `begun` is yielded once the first of them is open."""
        tells = self.dialect.delivery.progress and self.dialect.delivery.stream
        for event in events(self.job.engine, self.texts, prompts, self.job.cancel, tell if tells else None):
            if isinstance(event, Opened) and begun is not None:
                yield begun
                begun = None
            if isinstance(event, Finished):
                self.job.service.metrics.count_generation(event.generation)
            yield event
            if isinstance(event, Finished) and self.job.service.settings.keeps_answers and self.texts.refine is None:
                prompt, model = prompts[event.index // self.texts.n], self.job.reference.loaded.file.path
                keep_answer(cache_folder(), model, prompt.token_ids, event.generation.token_ids)
