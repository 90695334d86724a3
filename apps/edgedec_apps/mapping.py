"""One question asked of many rows: the answers in the order of the rows, from forwards that several rows share.

The rows' prompts begin alike, so what they have in common is read once. Each answer is the one that the row gets alone.
"""

import csv
import io
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Unpack

from edgedec.api.engine import Engine
from edgedec.api.requests import RequestOptions
from edgedec.errors import RequestError
from edgedec.progress import CancelToken
from edgedec.sequence import Generation

_PLACE = re.compile(r"\{([^\W\d][\w .-]*)\}")
_AHEAD = 8  # rows, for each that is written at a time, that may be done before one that takes longer
_WHOLE_LINE = "text"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file.

    Attributes:
        number: Its line, or its place in an array or a table, from 1 on.
        values: Its values by name; a line of text is the value of "text".
        error: Why it can't be read; empty where it can.
    """

    number: int
    values: Mapping[str, object]
    error: str = ""


def read_rows(content: str, ending: str) -> list[Row]:
    """Return the rows of a file with this ending: .jsonl and .json hold objects or texts, .csv a table with a head.

    In any other file each line is a row. Blank lines are none.

    Raises:
        RequestError: A .json file is no array, or a .csv file no table.
    """
    if ending == ".csv":
        try:
            table = list(csv.DictReader(io.StringIO(content), strict=True))
        except csv.Error as error:
            raise RequestError(f"the file is no table of commas: {error}") from error
        return [Row(n, {name: value or "" for name, value in row.items() if name}) for n, row in enumerate(table, 1)]
    if ending == ".json":
        array = _parsed(content)
        if not isinstance(array, list):
            raise RequestError("the file is no JSON array; put objects or texts into one, or one a line into a .jsonl")
        return [_row(n, value) for n, value in enumerate(array, 1)]
    lines = ((n, line) for n, line in enumerate(content.split("\n"), 1) if line.strip())
    if ending == ".jsonl":
        return [_row(n, _parsed(line)) for n, line in lines]
    return [Row(n, {_WHOLE_LINE: line.removesuffix("\r")}) for n, line in lines]


def _parsed(text: str) -> object:
    """Return a JSON value, or the error that says why the text is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return error


def _row(number: int, value: object) -> Row:
    if isinstance(value, dict):
        return Row(number, value)
    if isinstance(value, str):
        return Row(number, {_WHOLE_LINE: value})
    problem = f"no JSON ({value})" if isinstance(value, Exception) else f"a JSON {type(value).__name__}"
    return Row(number, {}, f"the row is {problem}; write an object or a text")


def filled(prompt: str, row: Row) -> str:
    """Return a prompt with the row's value in each place that names one; braces around anything else stay.

    Raises:
        RequestError: The row can't be read, or has no such value.

    >>> filled('Sort {name}, {age}: {"a": 1}', Row(1, {"name": "Ada", "age": 36}))
    'Sort Ada, 36: {"a": 1}'
    """
    if row.error:
        raise RequestError(row.error)

    def value(place: re.Match[str]) -> str:
        if place[1] not in row.values:
            raise RequestError(f"the row has no {place[1]!r}; it has {', '.join(map(repr, row.values)) or 'nothing'}")
        its = row.values[place[1]]
        return its if isinstance(its, str) else json.dumps(its, ensure_ascii=False)

    return _PLACE.sub(value, prompt)


def tried(prompt: str, row: Row) -> str | RequestError:
    """Return a prompt with a row's values, or the error of filled()."""
    try:
        return filled(prompt, row)
    except RequestError as error:
        return error


def names_a_place(prompt: str) -> bool:
    """Return whether a prompt has a place for a row's value."""
    return _PLACE.search(prompt) is not None


def map_prompts(
    engine: Engine,
    prompts: Iterable[str | RequestError],
    *,
    system: str | None = None,
    think: bool | int | None = None,
    cancel: CancelToken | None = None,
    **options: Unpack[RequestOptions],
) -> Iterator[Generation | RequestError]:
    """Yield the answer to each prompt, in their order: what Engine.chat gives it alone, with the same options.

    As many are written at a time as the engine was loaded for (n_parallel). A model without a chat template goes on
    from the prompts. When `cancel` stops the work, the answers so far were yielded, and no half one is.

    Args:
        engine: The loaded model.
        prompts: What is asked; an error stands for a prompt that there is none of.
        system: The system message, or None.
        think: As of Engine.chat.
        cancel: Stops the work, from any thread.
        **options: Those of Engine.stream.

    Yields:
        The answer, or the error that this prompt alone has: it does not fit the context, for example.

    Raises:
        EdgedecError: What stops all rows, such as a runtime that was lost.
    """
    before = [] if system is None else [{"role": "system", "content": system}]
    stop = CancelToken()

    def answer(prompt: str | RequestError) -> Generation | RequestError:
        if isinstance(prompt, RequestError):
            return prompt
        try:
            if engine.template is None:
                return engine.generate(prompt, cancel=stop, **options)
            return engine.chat([*before, {"role": "user", "content": prompt}], cancel=stop, think=think, **options)
        except RequestError as error:
            return error

    n_slots = len(engine.pool.slots)
    with (cancel or CancelToken()).calling(stop.cancel), ThreadPoolExecutor(n_slots, "edgedec-map") as threads:
        try:
            for result in _in_order(threads, answer, prompts, _AHEAD * n_slots):
                if isinstance(result, Generation) and result.finish_reason == "cancelled":
                    return
                yield result
        finally:
            stop.cancel()
            threads.shutdown(wait=False, cancel_futures=True)


def _in_order(
    threads: ThreadPoolExecutor,
    answer: Callable[[str | RequestError], Generation | RequestError],
    prompts: Iterable[str | RequestError],
    most: int,
) -> Iterator[Generation | RequestError]:
    """Yield the answers in the order of the prompts; at most `most` are begun before the first of them is yielded."""
    begun: deque[Future[Generation | RequestError]] = deque()
    for prompt in prompts:
        if len(begun) == most:
            yield begun.popleft().result()
        begun.append(threads.submit(answer, prompt))
    while begun:
        yield begun.popleft().result()
