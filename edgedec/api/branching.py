"""Decoding of one's own on an engine: branches of a prompt, and the partial texts that searches move."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from edgedec.api.engine import Engine
from edgedec.api.requests import Prompt
from edgedec.callers import checks_arguments
from edgedec.choosing.partial_texts import PartialTexts
from edgedec.decoding.branches import Branches, branches_on
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sessions.text_pages import MOST_FORKS


@checks_arguments
def branches(
    engine: Engine,
    prompt: Prompt,
    *,
    most: int = MOST_FORKS,
    cancel: CancelToken | None = None,
    on_progress: OnProgress | None = None,
) -> AbstractContextManager[Branches]:
    """Open branches of a prompt inside the block, for decoding of one's own; see edgedec.decoding.branches.

    The block waits for its turn as a request does. The model's other requests share forwards with it where the model
    was loaded for several at a time. Close the model after the block.

    Args:
        engine: Has the model.
        prompt: The text or the token ids to go on from.
        most: Most branches at a time.
        cancel: Stops the forward that is running, from any thread; the forward then raises CancelledError.
        on_progress: Called while the prompt is read.

    Raises:
        CapabilityError: The runtime can't fork sessions, or a row depends there on what else is in its forward.
        RequestError: The prompt is empty, or `most` is out of range.
        PromptTooLongError, ContextFullError: The prompt does not fit the context.
        CancelledError: `cancel` was cancelled before the prompt was read.
    """
    request, stop = engine.requests.plain(prompt, {}), cancel or CancelToken()
    return branches_on(engine.pool, request, stop, most=most, on_progress=on_progress)


@checks_arguments
@contextmanager
def partial_texts(
    engine: Engine,
    prompt: Prompt,
    *,
    max_tokens: int = 512,
    stop: Sequence[str] = (),
    cancel: CancelToken | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[PartialTexts]:
    """Read a prompt, and hold its texts inside the block for a search: edgedec.choosing has the searches.

        with partial_texts(model, model.chat_ids(messages), max_tokens=200) as texts:
            best = beam_search(texts, 4)[0]
            print(texts.text(best.text))

    Args:
        engine: Has the model.
        prompt: The text or the token ids to go on from; Engine.chat_ids() makes them of messages.
        max_tokens: Most tokens of a text; fewer where the context is full before.
        stop: Strings, each of which ends a text.
        cancel: Ends the search with CancelledError, from any thread.
        on_progress: Called while the prompt is read.

    Raises:
        RequestError: `max_tokens` or `stop` is out of range.
        What branches() raises.
    """
    ids, params = engine.prompt_ids(prompt), SamplingParams(max_tokens=max_tokens, stop=tuple(stop))
    with (
        branches(engine, ids, cancel=cancel, on_progress=on_progress) as opened,
        texts_on(engine, opened, ids, params, cancel=cancel) as texts,
    ):
        yield texts


def texts_on(
    engine: Engine,
    opened: Branches,
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    cancel: CancelToken | None,
    on_progress: OnProgress | None = None,
) -> PartialTexts:
    """Return the texts of a prompt on its branches; `params` say where texts end, as the context does."""
    room = opened.n_ctx - len(token_ids)
    return PartialTexts(
        opened,
        token_ids,
        is_end=(lambda token_id: False) if params.ignore_end else engine.tokenizer.is_end,
        decode=engine.tokenizer.decode,
        max_tokens=max(1, min(room, params.max_tokens or room)),
        stop=params.stop,
        cancel=cancel,
        on_progress=on_progress,
    )
