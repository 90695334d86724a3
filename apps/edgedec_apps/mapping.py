"""One question asked of many rows: the answers in the order of the rows, from forwards that several rows share.

The rows' prompts begin alike, so what they have in common is read once. Each answer is the one that the row gets alone.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Unpack

from edgedec.api.engine import Engine
from edgedec.api.requests import RequestOptions
from edgedec.errors import CancelledError, RequestError
from edgedec.progress import CancelToken
from edgedec.sequence import Generation

_PLACE = re.compile(r"\{([^\W\d][\w .-]*)\}")
_AHEAD = 8  # rows, for each that is written at a time, that may be done before one that takes longer


def prompts_of(prompt: str, content: str, *, is_json: bool) -> dict[int, str | RequestError]:
    """Return the prompt of each line that is not blank, by the line's number; or the error that the line has.

    Args:
        prompt: The text with {name} for a value of the row; braces around anything else stay.
        content: The lines. A line of text is the value "text".
        is_json: Whether a line is a JSON object with the values, or a JSON text.

    Raises:
        RequestError: No place for a row is in the prompt, or there is no row.

    >>> prompts_of('Sort {text}: {"a": 1}', "red\\n\\nblue", is_json=False)
    {1: 'Sort red: {"a": 1}', 3: 'Sort blue: {"a": 1}'}
    """
    if _PLACE.search(prompt) is None:
        raise RequestError("--prompt has no place for a row: write {text} where a line goes, or {name} for a value")
    prompts: dict[int, str | RequestError] = {}
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                prompts[number] = _filled(prompt, line.removesuffix("\r"), is_json=is_json)
            except RequestError as error:
                prompts[number] = error
    if not prompts:
        raise RequestError("there are no rows; write one a line")
    return prompts


def _filled(prompt: str, line: str, *, is_json: bool) -> str:
    try:
        row = json.loads(line) if is_json else line
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the row is no JSON ({error}); write an object or a text") from error
    values = {"text": row} if isinstance(row, str) else row
    if not isinstance(values, dict):
        raise RequestError(f"the row is a JSON {type(row).__name__}; write an object or a text")

    def value(place: re.Match[str]) -> str:
        if place[1] not in values:
            raise RequestError(f"the row has no {place[1]!r}; it has {', '.join(map(repr, values)) or 'nothing'}")
        its = values[place[1]]
        return its if isinstance(its, str) else json.dumps(its, ensure_ascii=False)

    return _PLACE.sub(value, prompt)


def map_prompts(
    engine: Engine,
    prompts: Iterable[str | RequestError],
    *,
    system: str | None = None,
    think: bool | int | None = None,
    cancel: CancelToken | None = None,
    **options: Unpack[RequestOptions],
) -> Iterator[Generation | RequestError]:
    """Yield the answer to each prompt, in their order, or its error: what Engine.chat gives it alone.

    As many are written at a time as the engine was loaded for (n_parallel). A model without a chat template goes on
    from the prompts.

    Args:
        engine: The loaded model.
        prompts: What is asked; an error stands for a prompt that there is none of.
        system: The system message, or None.
        think: As of Engine.chat.
        cancel: Stops the work, from any thread.
        **options: Those of Engine.stream.

    Raises:
        CancelledError: `cancel` stopped the work.
        EdgedecError: What stops all rows, such as a runtime that was lost.
    """
    before = [] if system is None else [{"role": "system", "content": system}]
    stop, n_slots = CancelToken(), len(engine.pool.slots)
    begun: deque[Future[Generation | RequestError]] = deque()

    def answer(prompt: str | RequestError) -> Generation | RequestError:
        if isinstance(prompt, RequestError):
            return prompt
        chat = [*before, {"role": "user", "content": prompt}]
        try:
            if engine.template is None:
                text = engine.generate(prompt, cancel=stop, **options)
            else:
                text = engine.chat(chat, cancel=stop, think=think, **options)
        except RequestError as error:
            return error
        if text.finish_reason == "cancelled":
            raise CancelledError("the work on the rows was cancelled")
        return text

    with (cancel or CancelToken()).calling(stop.cancel), ThreadPoolExecutor(n_slots, "edgedec-map") as threads:
        try:
            for prompt in prompts:
                if len(begun) == _AHEAD * n_slots:
                    yield begun.popleft().result()
                begun.append(threads.submit(answer, prompt))
            while begun:
                yield begun.popleft().result()
        finally:
            stop.cancel()
            threads.shutdown(wait=False, cancel_futures=True)
