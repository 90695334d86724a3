"""Lets a target write prompts and answers, and keeps them as lessons."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from edgedec.api.engine import Engine
from edgedec.errors import PromptTooLongError, RequestError, argument
from edgedec.model import Session
from edgedec.progress import CancelToken, OnProgress, Progress, check_cancelled, report_progress
from edgedec_export.training.lessons.decode_many import Task, Text, decode_many, halves
from edgedec_export.training.lessons.lesson_files import Lesson, lesson_files, prompt_hash, write_lessons
from edgedec_export.training.lessons.openings import Opening, opening_of

PROMPTS_PER_FILE = 8
TEMPERATURES = (0.0, 0.8)
"""Every prompt is answered once at each of these temperatures."""

_PROMPT_TEMPERATURE = 1.0
_FILES_IN_VAIN = 32  # without a single answer: then collecting would never end
_MARK = "\x00"


@dataclass(frozen=True, slots=True)
class Collecting:
    """What is collected.

    Attributes:
        folder: Where the files of lessons are.
        layers: The layers whose output is kept: those of the taps, and the last layer.
        n_tokens: Tokens of answers that are wanted in all.
        n_answer: Most tokens of an answer.
        n_message: Most tokens that the target adds to an opening.
        seed: Another seed gives other prompts and answers.
        n_ctx: Tokens of a prompt with its answer.
        n_at_once: Texts that are written in one forward.
        prompts: The user's own prompts.
        texts: Texts that become the lessons, where the target is to write none: each is the number of the prompt's
            tokens, the prompt, and the answer.
        share: Which files to write: the number of the first one, and the distance to the next.
    """

    folder: Path
    layers: tuple[int, ...]
    n_tokens: int
    n_answer: int = 256
    n_message: int = 160
    seed: int = 0
    n_ctx: int = 1024
    n_at_once: int = 16
    prompts: tuple[Opening, ...] = ()
    texts: tuple[Sequence[int], ...] = ()
    share: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class _Key:
    """What a text is for: the question or an answer of a prompt."""

    number: int
    opening: Opening
    temperature: float | None = None
    message: str = ""


@dataclass(slots=True)
class _Open:
    """A file that is being collected: how many texts are still to come, and the lessons so far."""

    n_missing: int
    lessons: list[tuple[int, float, Lesson]] = field(default_factory=list)


def collect(
    engine: Engine, job: Collecting, on_progress: OnProgress | None = None, cancel: CancelToken | None = None
) -> None:
    """Let the target write until the folder holds as many tokens of answers as are wanted; files that exist stay.

    Raises:
        CapabilityError: The runtime can't do this; the cpu runtime can.
        RequestError: The model answers nothing.
        CancelledError: `cancel` was cancelled; the files that are complete stay.
        OSError: A file can't be written.
    """
    if job.texts:
        _read_texts(engine, job, on_progress, cancel)
        return
    collector = _Collector(engine, job)
    if on_progress is not None:
        on_progress(collector.progress())
    for text in decode_many(engine.model, collector.next_task, job.n_at_once, job.n_ctx, cancel):
        collector.take(text)
        if on_progress is not None:
            on_progress(collector.progress())


class _Collector:
    """The texts that are wanted next, and the files that are not complete yet."""

    def __init__(self, engine: Engine, job: Collecting) -> None:
        self._engine, self._job = engine, job
        self._files = lesson_files(job.folder)
        self._n_tokens = 0  # of the files before the next one, complete or not
        self._waiting: deque[Task[_Key]] = deque()
        self._open: dict[int, _Open] = {}
        self._next_number, self._step = job.share
        self._n_begun = 0
        while self._next_number in self._files and self._n_tokens < job.n_tokens:
            self._begin_file()

    def progress(self) -> Progress:
        """Return how many of the wanted tokens there are."""
        n_tokens = self._job.n_tokens
        is_over = self._n_tokens >= n_tokens and not self._open
        return Progress("answers", n_tokens if is_over else min(self._n_tokens, n_tokens - 1), n_tokens, "tokens")

    def next_task(self) -> Task[_Key] | None:
        """Return the next text to write: answers first, then prompts of the file that comes next."""
        while not self._waiting and self._n_tokens < self._job.n_tokens:
            self._begin_file()
        return self._waiting.popleft() if self._waiting else None

    def _begin_file(self) -> None:
        """Go on to the next file: count it where it is there, else add its prompts."""
        if self._n_begun >= _FILES_IN_VAIN and not self._n_tokens:
            raise RequestError(
                f"the model answered none of {self._n_begun * PROMPTS_PER_FILE} prompts; give prompts of your own "
                f"({argument('prompts')}), or a model that answers chats"
            )
        number, self._next_number = self._next_number, self._next_number + self._step
        self._n_begun += 1
        if number in self._files:
            self._n_tokens += self._files[number].n_tokens
            return
        self._open[number] = _Open(PROMPTS_PER_FILE)
        for n in range(number * PROMPTS_PER_FILE, (number + 1) * PROMPTS_PER_FILE):
            opening = opening_of(n, self._job.seed, self._job.prompts)
            if opening.is_whole:
                self._ask(_Key(n, opening), opening.text)
            else:
                self._waiting.append(self._prompt_task(n, opening))

    def _prompt_task(self, number: int, opening: Opening) -> Task[_Key]:
        engine = self._engine
        token_ids: list[int] = []
        if engine.template is not None:  # what it writes before the user's message
            rendered = engine.requests.render([{"role": "user", "content": _MARK}])
            token_ids = engine.requests.rendered_ids(rendered.partition(_MARK)[0])
        token_ids += engine.tokenizer.encode(opening.text, add_special=engine.template is None)
        params = replace(engine.requests.sampling(), temperature=_PROMPT_TEMPERATURE, seed=None)
        return Task(_Key(number, opening), tuple(token_ids), params, self._seed(number, 0), self._job.n_message)

    def _seed(self, number: int, which: int) -> int:
        return self._job.seed << 40 ^ number << 8 ^ which

    def take(self, text: Text[_Key]) -> None:
        """Take a text that is done: a prompt is answered, an answer becomes a lesson."""
        key = text.task.key
        if key.temperature is not None:
            file = key.number // PROMPTS_PER_FILE
            self._open[file].lessons.append((key.number, key.temperature, _lesson(text)))
            self._n_tokens += len(text.token_ids)
            self._settle(file)
            return
        written = text.token_ids[:-1] if text.ended else text.token_ids
        self._ask(key, (key.opening.text + self._engine.tokenizer.decode(written)).strip())

    def _ask(self, key: _Key, message: str) -> None:
        """Add the tasks of answering a message; an empty message, one too long or one of the benchmark is dropped."""
        job, file = self._job, key.number // PROMPTS_PER_FILE
        token_ids = self._rendered(message) if message and prompt_hash(message) not in benchmark_hashes() else []
        if token_ids and len(token_ids) + job.n_answer <= job.n_ctx:
            self._open[file].n_missing += len(TEMPERATURES)
            for which, temperature in enumerate(TEMPERATURES, start=1):
                params = replace(self._engine.requests.sampling(), temperature=temperature)
                answered = replace(key, temperature=temperature, message=message)
                seed = self._seed(key.number, which)
                self._waiting.appendleft(Task(answered, tuple(token_ids), params, seed, job.n_answer, job.layers))
        self._settle(file)

    def _rendered(self, message: str) -> list[int]:
        """Return the prompt's token ids; none where it does not fit the engine's context."""
        try:
            if self._engine.template is not None:
                return self._engine.chat_ids([{"role": "user", "content": message}])
            return list(self._engine.prompt_ids(message))
        except PromptTooLongError:
            return []

    def _settle(self, number: int) -> None:
        """Count one text of a file, and write the file when that was the last one."""
        file = self._open[number]
        file.n_missing -= 1
        if not file.n_missing:
            lessons = [lesson for _, _, lesson in sorted(file.lessons, key=lambda entry: entry[:2])]
            self._files[number] = write_lessons(self._job.folder, number, lessons)
            del self._open[number]


def _read_texts(engine: Engine, job: Collecting, on_progress: OnProgress | None, cancel: CancelToken | None) -> None:
    """Let the target read the job's texts; a file of lessons that exists stays."""
    files, session = lesson_files(job.folder), engine.session()
    for number in range(-(-len(job.texts) // PROMPTS_PER_FILE)):
        check_cancelled(cancel, "reading answers")
        report_progress(on_progress, "answers", number * PROMPTS_PER_FILE, len(job.texts), "texts")
        if number not in files:
            texts = job.texts[number * PROMPTS_PER_FILE : (number + 1) * PROMPTS_PER_FILE]
            write_lessons(job.folder, number, [_read(session, job.layers, text) for text in texts])
    session.close()


def _read(session: Session, layers: tuple[int, ...], text: Sequence[int]) -> Lesson:
    """Return a text as a lesson; as a draft has to foresee what was drawn, that counts as the most probable."""
    n_prompt, token_ids = text[0], np.array(text[1:], np.int32)
    hidden = session.forward(token_ids[:-1], n_past=0, taps=layers).hidden
    *taps, last = (halves(hidden[layer]) for layer in layers)
    digest = prompt_hash(" ".join(map(str, text[1 : 1 + n_prompt])))
    states, answer = np.concatenate(taps, axis=1), token_ids[n_prompt:]
    return Lesson("answers", digest, 0.0, n_prompt, token_ids, answer, states, last[n_prompt - 1 :])


def _lesson(text: Text[_Key]) -> Lesson:
    task, n_taps = text.task, len(text.task.layers) - 1
    taps = np.concatenate([text.states(i) for i in range(n_taps)], axis=1)
    last = text.states(n_taps)[len(task.prompt_ids) - 1 :]
    token_ids = np.array([*task.prompt_ids, *text.token_ids], np.int32)
    key = task.key
    return Lesson(
        key.opening.kind,
        prompt_hash(key.message),
        key.temperature or 0.0,
        len(task.prompt_ids),
        token_ids,
        np.array(text.best, np.int32),
        taps,
        last,
    )


@cache
def benchmark_hashes() -> frozenset[str]:
    """Return the hashes of the prompts that figures are measured on, which no head may learn from."""
    lines = Path(__file__).with_name("benchmark_prompts.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))
