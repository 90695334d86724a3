"""The user's own prompts: a file with one prompt a line, or JSON lines with "turns"."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgedec.errors import RequestError, StorageError
from edgedec_export.training.lessons.openings import Opening

OWN_KIND = "own"
_MOST_BYTES = 256_000_000


def read_prompts(paths: Sequence[Path]) -> tuple[Opening, ...]:
    """Return the prompts of files, in their order, each prompt once.

    A file that ends in .jsonl has one JSON object a line: the prompt is the first of its "turns", or its "prompt", and
    "task", where it is there, names the kind. Of any other file every line that is not empty is a prompt.

    Raises:
        StorageError: A file can't be read.
        RequestError: A file is not UTF-8, is too long or holds no prompt, or a line is no such object.
    """
    openings: dict[str, Opening] = {}
    for path in paths:
        n_before = len(openings)
        for opening in _of_file(path):
            openings.setdefault(opening.text, opening)
        if len(openings) == n_before and not any(True for _ in _of_file(path)):
            raise RequestError(f"{path} holds no prompt; write one prompt a line")
    return tuple(openings.values())


def _of_file(path: Path) -> Iterator[Opening]:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    if len(data) > _MOST_BYTES:
        raise RequestError(f"{path} holds more than {_MOST_BYTES} bytes; give a shorter file")
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parse(line, f"{path}, line {number}") if path.suffix == ".jsonl" else _own(OWN_KIND, line)


def _parse(line: str, where: str) -> Opening:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON ({error}); write one object a line") from error
    turns = entry.get("turns", [entry.get("prompt")]) if isinstance(entry, dict) else None
    kind = entry.get("task", OWN_KIND) if isinstance(entry, dict) else None
    text = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(text, str) or not text.strip() or not isinstance(kind, str) or not kind:
        raise RequestError(
            f'{where}: expected a JSON object with "turns", a list whose first element is the text of the prompt'
        )
    try:
        text.encode()
        kind.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where}: it holds a lone surrogate; write the text in UTF-8") from error
    return _own(kind, text)


def _own(kind: str, text: str) -> Opening:
    return Opening(kind, text.strip(), is_whole=True)
