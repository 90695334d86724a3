"""The file of the answers of `edgedec map`: a line for each row, whole and in order, with which a later run goes on.

A line has a key, which names what its answer depends on: the model, the settings, and the row's prompt.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from hashlib import sha256
from pathlib import Path

from edgedec import exact_json
from edgedec.errors import RequestError, StorageError
from edgedec.sequence import Generation
from edgedec_apps.cli.output_files import require_writable
from edgedec_apps.cli.wording import in_options
from edgedec_apps.replies import split_reply

_BEGIN = b'{"row": '
_DIFFERS = (
    "another model, or by another version",
    "other settings (the schema, the system message, or options of sampling)",
    "another prompt or row",
)


def keys_of(model: str, options: Mapping[str, object], prompts: Sequence[str | RequestError]) -> list[str]:
    """Return the key of each row's line: of the model (its fingerprint), of the options, and of the prompt."""
    settings = json.dumps({name: options[name] for name in sorted(options)}, default=_plain)
    before = f"{_short(model)}-{_short(settings)}"
    return [f"{before}-{_short(str(prompt))}" for prompt in prompts]


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else repr(value)


def _short(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]


def line_of(number: int, key: str, result: Generation | RequestError, *, is_json: bool) -> str:
    """Return the line of a row: with its answer, as JSON where that is what the text keeps to, or with its error."""
    document: dict[str, object] = {"row": number, "key": key}
    if isinstance(result, RequestError):
        document["error"] = in_options(result)
    elif is_json:
        text = split_reply(result.text).text if result.text.startswith("<think>") else result.text
        document["output"] = json.loads(text, parse_float=exact_json.exact_float)
    else:
        document["output"] = result.text
    return exact_json.dumps(document) + "\n"


class MappedFile:
    """A file of answers, which grows by whole lines.

    Args:
        path: The file; there may be none yet.

    Raises:
        StorageError: The file can't be written.
    """

    def __init__(self, path: Path) -> None:
        require_writable(path)
        self._path = path

    def go_on(self, keys: Sequence[str]) -> tuple[int, int]:
        """Return how many rows are in the file, and how many of these have errors; half a line at the end is cut off.

        Args:
            keys: The key of each row.

        Raises:
            RequestError: The file holds something else than answers of these rows in these settings; it is unchanged.
            StorageError: The file can't be read or written.
        """
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            n_failed = self._n_failed(whole.splitlines(), keys)
            half = data[len(whole) :]
            if not (half.startswith(_BEGIN) or _BEGIN.startswith(half)):
                raise self._foreign(whole.count(b"\n") + 1)
            if half:
                os.truncate(self._path, len(whole))
        except OSError as error:
            raise StorageError(f"{self._path} can't be read: {error.strerror or error}") from error
        return whole.count(b"\n"), n_failed

    def _n_failed(self, lines: Sequence[bytes], keys: Sequence[str]) -> int:
        """Return how many of the lines have errors (RequestError where they are not those of the first rows)."""
        if len(lines) > len(keys):
            raise RequestError(f"{self._path} has {len(lines)} answers for {len(keys)} rows; name another --out")
        n_failed = 0
        for number, (line, key) in enumerate(zip(lines, keys, strict=False), 1):
            try:
                document = json.loads(line)
                parts = document["key"].split("-")
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise self._foreign(number) from None
            for part, expected, what in zip(parts, key.split("-"), _DIFFERS, strict=False):
                if part != expected:
                    raise RequestError(
                        f"{self._path}, line {number}, was written with {what}; name another --out, or delete the file"
                    )
            n_failed += "error" in document
        return n_failed

    def _foreign(self, number: int) -> RequestError:
        return RequestError(f"{self._path}, line {number}, is no answer of edgedec map; name another --out")

    def add(self, line: str) -> None:
        """Add a line (StorageError where it can't be written)."""
        try:
            with self._path.open("a", encoding="ascii") as file:
                file.write(line)
        except OSError as error:
            raise StorageError(f"{self._path} could not be written: {error.strerror or error}") from error
