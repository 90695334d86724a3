"""What a head learns from, on the disk: answers with the target's hidden states, in files that are written once.

A file holds the lessons of a few prompts. Which prompts those are depends only on the file's number and the recipe, so
a run that was killed goes on with the numbers that are missing. A file appears whole or not at all, and its name holds
the hash of its contents.
"""

import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec.storage.whole_file import write_atomically

HELD_BACK_EVERY = 12
"""One file in so many is held back: the head is measured on it, and never learns from it."""

_NAME = re.compile(r"lessons-(\d{6})-(\d+)-([0-9a-f]{16})\.npz")
_HASH_DIGITS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """An answer of the target. n is the number of tokens, n_prompt of them the prompt's; H is a hidden state's length.

    Attributes:
        kind: The kind of prompt.
        prompt_hash: What prompt_hash() returns for the user's message.
        temperature: What the answer was drawn with.
        n_prompt: Tokens of the prompt.
        token_ids: int32[n], prompt and answer.
        best: int32[n - n_prompt], the target's most probable token at each place of the answer.
        taps: f16[n - 1, n_taps * H], the taps of every token but the last one.
        last: f16[n - n_prompt, H], what left the last layer where each token of the answer was chosen.
    """

    kind: str
    prompt_hash: str
    temperature: float
    n_prompt: int
    token_ids: NDArray[np.int32]
    best: NDArray[np.int32]
    taps: NDArray[np.float16]
    last: NDArray[np.float16]

    @property
    def n_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - self.n_prompt


@dataclass(frozen=True, slots=True)
class LessonFile:
    """A file of lessons.

    Attributes:
        path: Where it is.
        number: Its number, from 0.
        n_tokens: Tokens of its answers.
    """

    path: Path
    number: int
    n_tokens: int

    @property
    def is_held_back(self) -> bool:
        """Whether a head is measured on its lessons instead of learning from them."""
        return self.number % HELD_BACK_EVERY == HELD_BACK_EVERY - 1

    @property
    def is_judge(self) -> bool:
        """Whether a head that goes on learning is judged by it, and sees it no other way."""
        return self.number % HELD_BACK_EVERY == HELD_BACK_EVERY // 2

    def prompt_hashes(self) -> set[str]:
        """Return the hashes of its prompts, without reading the rest; raises what read() raises."""
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return set(arrays["prompt_hash"].tolist())
        except (OSError, ValueError, KeyError, BadZipFile):
            return {lesson.prompt_hash for lesson in self.read()}

    def answers(self) -> list[NDArray[np.int32]]:
        """Return the token ids of its answers, without reading the hidden states; raises what read() raises."""
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                ends = np.cumsum(arrays["n"]).tolist()
                token_ids = arrays["token_ids"] if ends else np.empty(0, np.int32)
                parts = zip([0, *ends[:-1]], arrays["n_prompt"].tolist(), ends, strict=True) if ends else ()
                return [token_ids[begin + n_prompt : end] for begin, n_prompt, end in parts]
        except (OSError, ValueError, KeyError, BadZipFile):
            return [lesson.token_ids[lesson.n_prompt :] for lesson in self.read()]

    def read(self) -> list[Lesson]:
        """Return the lessons.

        Raises:
            ModelFormatError: The contents are not those that were written. The file is deleted, so that the next run
                writes it again.
        """
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ModelFormatError(f"{self.path}: {error.strerror}; run the command again to write it again") from error
        match = _NAME.fullmatch(self.path.name)
        if match is None or match[3] != _hash(data):
            self.path.unlink(missing_ok=True)
            raise ModelFormatError(f"{self.path} was damaged and is deleted; run the command again to write it again")
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                return list(_lessons(arrays))
        except (ValueError, KeyError, BadZipFile) as error:
            raise ModelFormatError(f"{self.path} is no file of lessons ({error}); delete it") from error


def prompt_hash(message: str) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a message's words: case, spaces and punctuation do not count.

    >>> prompt_hash("What is  RAIN?") == prompt_hash("what is rain")
    True
    """
    return hashlib.sha256(" ".join(re.findall(r"\w+", message.lower())).encode()).hexdigest()[:_HASH_DIGITS]


def lesson_files(folder: Path) -> dict[int, LessonFile]:
    """Return the files of lessons in a folder by number, ascending; other files are passed over."""
    matches = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    files = [LessonFile(folder / match[0], int(match[1]), int(match[2])) for match in matches]
    return {file.number: file for file in sorted(files, key=lambda file: file.number)}


def first_files(folder: Path, n_tokens: int) -> list[LessonFile]:
    """Return the first files of a folder, numbers 0, 1, 2, ..., that hold `n_tokens` tokens of answers; [] before.

    Which files these are depends on the recipe alone, not on how many more an earlier run collected.
    """
    files, total = lesson_files(folder), 0
    for number in range(len(files)):
        if number not in files:
            return []
        total += files[number].n_tokens
        if total >= n_tokens:
            return [files[i] for i in range(number + 1)]
    return []


def write_lessons(folder: Path, number: int, lessons: Sequence[Lesson]) -> LessonFile:
    """Write a file of lessons, maybe of none, and return it.

    Raises:
        OSError: The file can't be written.
    """
    arrays: dict[str, Any] = {
        "kind": np.array([lesson.kind for lesson in lessons], dtype=np.str_),
        "prompt_hash": np.array([lesson.prompt_hash for lesson in lessons], dtype=np.str_),
        "temperature": np.array([lesson.temperature for lesson in lessons], np.float32),
        "n_prompt": np.array([lesson.n_prompt for lesson in lessons], np.int32),
        "n": np.array([len(lesson.token_ids) for lesson in lessons], np.int32),
    }
    for name in ("token_ids", "best", "taps", "last"):
        if lessons:
            arrays[name] = np.concatenate([getattr(lesson, name) for lesson in lessons])
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    data, n_tokens = buffer.getvalue(), sum(lesson.n_answer for lesson in lessons)
    path = folder / f"lessons-{number:06}-{n_tokens}-{_hash(data)}.npz"
    write_atomically(path, data, sync=True)
    return LessonFile(path, number, n_tokens)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_HASH_DIGITS]


def _lessons(arrays: Mapping[str, NDArray[Any]]) -> Iterator[Lesson]:
    """Yield the lessons that write_lessons joined."""
    kinds, hashes, temperatures = arrays["kind"], arrays["prompt_hash"], arrays["temperature"]
    joined = {name: arrays[name] for name in ("token_ids", "best", "taps", "last")} if len(kinds) else {}
    at = dict.fromkeys(joined, 0)
    for i, (n_prompt, n) in enumerate(zip(arrays["n_prompt"].tolist(), arrays["n"].tolist(), strict=True)):
        lengths = {"token_ids": n, "best": n - n_prompt, "taps": n - 1, "last": n - n_prompt}
        parts = {name: joined[name][at[name] : at[name] + length] for name, length in lengths.items()}
        at = {name: at[name] + length for name, length in lengths.items()}
        yield Lesson(str(kinds[i]), str(hashes[i]), float(temperatures[i]), n_prompt, **parts)
