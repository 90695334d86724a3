"""The file of the answers of `edgedec map`: one line a row, in the rows' order. A later run goes on behind them."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from edgedec import exact_json
from edgedec.errors import RequestError, StorageError, as_storage_error
from edgedec.sequence import Generation
from edgedec_apps.cli.shown.replies import cut_text
from edgedec_apps.cli.wording import in_options
from edgedec_apps.replies import split_reply

_BEGIN = b'{"row": '
_DIFFERS = ("another model or version", "another schema or system message, or other sampling", "another prompt or row")


def keys_of(model: str, settings: Mapping[str, object], prompts: Iterable[str | RequestError]) -> list[str]:
    """Return the key of each row's line: of the model (its fingerprint), the settings, and the prompt."""

    def short(value: object) -> str:
        return sha256(json.dumps(value, default=repr, sort_keys=True).encode()).hexdigest()[:12]

    before = f"{short(model)}-{short(settings)}"
    return [f"{before}-{short(str(prompt))}" for prompt in prompts]


def answer_of(number: int, key: str, result: Generation | RequestError, *, is_json: bool) -> dict[str, object]:
    """Return the JSON object of a row: with its output, as JSON where the text keeps to a schema; or with its error."""
    try:
        return {"row": number, "key": key, "output": _output(result, is_json=is_json)}
    except RequestError as error:
        return {"row": number, "key": key, "error": in_options(error)}


def _output(result: Generation | RequestError, *, is_json: bool) -> object:
    if isinstance(result, RequestError):
        raise result
    if error := cut_text(result):
        raise error
    if result.is_whole is False:
        raise RequestError(f"the text ends at {result.stop_string!r}, before its grammar allowed an end")
    if not is_json:
        return result.text
    text = split_reply(result.text).text if result.text.startswith("<think>") else result.text
    try:
        return json.loads(text, parse_float=exact_json.exact_float)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or as many levels
        raise RequestError(f"the answer's JSON can't be read: {error}") from error


def n_answered(path: Path, keys: Sequence[str]) -> tuple[int, int, int]:
    """Return a file's number of rows, how many of these are errors, and its bytes; a last line in part is cut off.

    Args:
        path: The file; there may be none yet. Of a device or a pipe nothing is read.
        keys: The key of each row.

    Raises:
        RequestError: The file holds something else than answers to these rows in these settings; it is unchanged.
        StorageError: The file can't be read or written.
    """
    n_failed = 0
    with as_storage_error(f"{path} can't be read"):
        content = path.read_bytes() if path.is_file() else b""
        *lines, half = content.split(b"\n")
        if len(lines) > len(keys):
            raise RequestError(f"{path} has {len(lines)} answers for {len(keys)} rows; name another --out")
        for number, (line, key) in enumerate(zip(lines, keys, strict=False), 1):
            n_failed += _has_error(line, key, f"{path}, line {number},")
        if not (half.startswith(_BEGIN) or _BEGIN.startswith(half)):
            raise RequestError(f"{path}, line {len(lines) + 1}, is no answer of edgedec map; name another --out")
        if half:
            os.truncate(path, path.stat().st_size - len(half))
    return len(lines), n_failed, len(content) - len(half)


def add_line(path: Path, line: str, n_bytes: int) -> int:
    """Add a line to a file of `n_bytes`, and return its bytes then.

    Raises:
        StorageError: The file can't be written, or has other bytes: another process writes it.
    """
    with as_storage_error(f"{path} could not be written"), path.open("a", encoding="ascii") as file:
        if path.is_file() and file.tell() != n_bytes:
            raise StorageError(f"{path} was changed by another process, perhaps the same command; let one end first")
        return n_bytes + file.write(line)


def _has_error(line: bytes, key: str, where: str) -> bool:
    """Return whether an answer of an earlier run is an error (RequestError unless it has the key)."""
    try:
        answer = json.loads(line)
        parts = answer["key"].split("-")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RequestError(f"{where} is no answer of edgedec map; name another --out") from None
    for part, expected, what in zip(parts, key.split("-"), _DIFFERS, strict=False):
        if part != expected:
            raise RequestError(f"{where} was written with {what}; name another --out, or delete the file")
    return "error" in answer
