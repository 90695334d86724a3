"""The prompts of a benchmark: one JSON object a line with "id", "task" and "turns", of which the first turn is used.

The default set, beside this file, has five tasks with four prompts each.
"""

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from edgedec.api.engine import Engine
from edgedec.errors import PromptTooLongError, RequestError, counted
from edgedec_apps.texts import read_text

T = TypeVar("T")
K = TypeVar("K")

DEFAULT_PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt of the file.

    Attributes:
        id: The name of the prompt, unique in the file.
        task: The kind of prompt; figures are reported per task.
        text: The user's message.
    """

    id: str
    task: str
    text: str


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt for a model.

    Attributes:
        id, task: As in BenchPrompt.
        token_ids: Token ids of the prompt, with the chat template where the model has one.
        seed: The seed of every run of this prompt.
    """

    id: str
    task: str
    token_ids: tuple[int, ...]
    seed: int


def read_prompts(path: Path = DEFAULT_PROMPTS, per_task: int | None = None) -> list[BenchPrompt]:
    """Return the first `per_task` prompts of every task in a file; tasks come in the order of the file.

    Raises:
        StorageError: The file can't be read.
        RequestError: The file is not UTF-8 or too long, has no prompt, or has a line that is no prompt; the message
            names the line.
    """
    prompts: dict[str, BenchPrompt] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            prompt = _parse(line, where)
            if prompt.id in prompts:
                raise RequestError(f'{where}: the "id" {prompt.id!r} was used before; give every prompt its own')
            prompts[prompt.id] = prompt
    if not prompts:
        raise RequestError(f'{path} holds no prompt; write one JSON object a line, with "id", "task" and "turns"')
    tasks = grouped(prompts.values(), lambda prompt: prompt.task)
    return [prompt for group in tasks.values() for prompt in group[:per_task]]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items with each key, in their order, by key.

    >>> grouped(["a", "bc", "d"], len)
    {1: ['a', 'd'], 2: ['bc']}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def one_of_each(requests: Iterable[BenchRequest]) -> list[BenchRequest]:
    """Return the prompts in an order that has one of each task, then a second one of each, and so on."""
    tasks = grouped(requests, lambda request: request.task).values()
    return [request for turn in zip_longest(*tasks) for request in turn if request is not None]


def prepare(engine: Engine, prompts: list[BenchPrompt], max_tokens: int) -> list[BenchRequest]:
    """Return the prompts as token ids: through the chat template, or unchanged where the model has none.

    Raises:
        PromptTooLongError: A prompt with its answer does not fit the context.
    """
    requests = []
    for prompt in prompts:
        token_ids = tuple(_token_ids(engine, prompt.text))
        if len(token_ids) + max_tokens > engine.n_ctx:
            raise PromptTooLongError(
                f"the prompt {prompt.id} takes {counted(len(token_ids), 'token')} and its answer up to {max_tokens}; "
                f"the context has {engine.n_ctx}. Use a longer one (--context {len(token_ids) + max_tokens}), "
                "or fewer --max-tokens"
            )
        requests.append(BenchRequest(prompt.id, prompt.task, token_ids, zlib.crc32(prompt.id.encode())))
    return requests


def _token_ids(engine: Engine, text: str) -> list[int]:
    if engine.template is not None:
        return engine.chat_ids([{"role": "user", "content": text}])
    return engine.tokenizer.encode(text)


def _parse(line: str, where: str) -> BenchPrompt:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON ({error}); write one object a line") from error
    if not isinstance(entry, dict):
        raise RequestError(f'{where}: expected a JSON object with "id", "task" and "turns"')
    for key in ("id", "task"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise RequestError(f'{where}: "{key}" is {entry.get(key)!r}; it must be a string that is not empty')
    turns = entry.get("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise RequestError(f'{where}: "turns" must be a list whose first element is the text of the prompt')
    try:
        turns[0].encode()
    except UnicodeEncodeError as error:
        raise RequestError(f'{where}: "turns" holds a lone surrogate; write the text in UTF-8') from error
    return BenchPrompt(entry["id"], entry["task"], turns[0])
