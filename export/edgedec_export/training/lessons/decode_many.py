"""Many texts at once, each with the hidden states that the target had while it wrote: what a head learns from.

A batch-invariant model gives each row the bits that it has alone. So a text does not depend on the other texts, and the
hidden states of a text are those that a head will read when the runtime writes this text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError
from edgedec.model import Forward, ForwardItem, Model, RowGroup, Session
from edgedec.progress import CancelToken, check_cancelled
from edgedec.sampling import Noise, SamplingParams, draw

_LARGEST_HALF = 65504.0

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Task(Generic[K]):
    """A text to write.

    Attributes:
        key: What the text is for; decode_many does not look at it.
        prompt_ids: The prompt; at least one token.
        params: How tokens are drawn.
        seed: Of the noise.
        n_most: Most tokens to write.
        layers: The layers whose output to keep for every token read, in this order; none for the text alone.
    """

    key: K
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    n_most: int
    layers: tuple[int, ...] = ()


@dataclass(slots=True)
class Text(Generic[K]):
    """What became of a task; n is the number of tokens read: all but the last written one.

    Attributes:
        task: The task.
        token_ids: The tokens written, with the end token where one came.
        best: For each token written, the most probable one in its place.
        hidden: For each of the task's layers, pieces that make up f16[n, n_embd].
        ended: Whether an end token came.
    """

    task: Task[K]
    token_ids: list[int] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    hidden: list[list[NDArray[np.float16]]] = field(default_factory=list)
    ended: bool = False

    def states(self, index: int) -> NDArray[np.float16]:
        """Return f16[n, n_embd], what left the task's layer number `index` for each token read."""
        return np.concatenate(self.hidden[index])


def decode_many(
    model: Model,
    next_task: Callable[[], Task[K] | None],
    n_at_once: int,
    n_ctx: int,
    cancel: CancelToken | None = None,
) -> Iterator[Text[K]]:
    """Write the texts of tasks, several in one forward, and yield each when it is done; the order is by length.

    Args:
        model: The target.
        next_task: Returns the next task, or None where there is none for now: it is asked again when a text was
            yielded. Decoding ends when it returns None and no text is being written.
        n_at_once: Texts in one forward.
        n_ctx: Tokens of the longest text, prompt included.
        cancel: Stops between two forwards.

    Raises:
        CapabilityError: The model's rows depend on what else is in a forward.
        CancelledError: `cancel` was cancelled.
    """
    if model.batch_invariant is not True:
        raise CapabilityError(f"the {model.card.runtime} runtime can't train a head; use the cpu runtime")
    free = [model.session(n_ctx) for _ in range(n_at_once)]
    try:
        yield from _decode(model, next_task, free, cancel)
    finally:
        for session in free:
            session.close()


def _decode(
    model: Model, next_task: Callable[[], Task[K] | None], free: list[Session], cancel: CancelToken | None
) -> Iterator[Text[K]]:
    """Write texts on the sessions `free`; all of them are in the list again at the end."""
    running: list[tuple[Session, Text[K]]] = []
    try:
        while True:
            while free and (task := next_task()) is not None:
                text = Text(task, hidden=[[] for _ in task.layers])
                forward = free[-1].forward(np.array(task.prompt_ids, np.int32), n_past=0, taps=task.layers)
                running.append((free.pop(), text))
                _take(model, text, forward)
            if not running:
                return
            check_cancelled(cancel, "writing answers")
            done = [pair for pair in running if _is_done(pair[1])]
            running = [pair for pair in running if not _is_done(pair[1])]
            for session, text in done:
                free.append(session)
                yield text
            if running and not done:
                items = [_item(session, text) for session, text in running]
                for (_, text), forward in zip(running, model.forward(items), strict=True):
                    _take(model, text, forward)
    finally:
        free.extend(session for session, _ in running)


def _item(session: Session, text: Text[K]) -> ForwardItem:
    n_past = len(text.task.prompt_ids) + len(text.token_ids) - 1
    return ForwardItem(session, n_past, (RowGroup(np.array(text.token_ids[-1:], np.int32)),), taps=text.task.layers)


def _take(model: Model, text: Text[K], forward: Forward) -> None:
    """Draw a text's next token, and keep the hidden states of the tokens that were read."""
    task, row = text.task, forward.logits[-1]
    for layer, pieces in zip(task.layers, text.hidden, strict=True):
        pieces.append(halves(forward.hidden[layer]))
    position = len(task.prompt_ids) + len(text.token_ids)
    best = forward.ops.argmax(row)
    token = best if task.params.greedy else draw(row, task.params, (), Noise(task.seed), position, forward.ops)
    text.token_ids.append(token)
    text.best.append(best)
    text.ended = model.tokenizer.is_end(token)


def _is_done(text: Text[K]) -> bool:
    return text.ended or len(text.token_ids) >= text.task.n_most


def halves(states: NDArray[np.float32]) -> NDArray[np.float16]:
    """Return hidden states as float16, with numbers that it can't hold cut to the largest that it can."""
    return np.clip(states, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16)
