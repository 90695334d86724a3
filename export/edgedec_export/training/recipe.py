"""What a training is made from, kept beside its files, so that another run goes on with the same."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgedec.errors import ModelFormatError, RequestError, argument
from edgedec.gguf.file import storage_error
from edgedec.storage.whole_file import write_atomically
from edgedec_runtimes.trained_heads.card import Target

FILE = "recipe.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the answers depend on; how many there are is no part of it.

    Attributes:
        weights: The hash of the target's weights (edgedec_runtimes.trained_heads.target).
        taps: The tapped layers.
        n_answer: Most tokens of an answer.
        n_ctx: Tokens of a prompt with its answer.
        seed: Of prompts and answers.
        prompts: The hash of the user's own prompts; "" without.
    """

    weights: str
    taps: tuple[int, ...]
    n_answer: int
    n_ctx: int
    seed: int
    prompts: str = ""

    @classmethod
    def of(cls, target: Target, taps: tuple[int, ...], texts: list[str], **sizes: int) -> "Recipe":
        """Return the recipe for a target, and the user's own prompts `texts`."""
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32] if texts else ""
        return cls(weights=target.weights_hash, taps=taps, prompts=digest, **sizes)

    @property
    def key(self) -> str:
        """A text that differs where two recipes differ."""
        return json.dumps(_values(self))


def keep(folder: Path, recipe: Recipe) -> None:
    """Write the recipe into a folder, or check that the one there is the same.

    Raises:
        RequestError: The folder holds files of another recipe; the message names what differs.
        ModelFormatError: The recipe there is damaged.
        StorageError: The folder or the file can't be written.
    """
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = path.read_bytes() if path.exists() else None
        if earlier is None:
            write_atomically(path, json.dumps(_values(recipe), indent=1).encode(), sync=True)
            return
    except OSError as error:
        raise storage_error(path, error) from error
    _compare(path, earlier, _values(recipe))


def _compare(path: Path, earlier: bytes, recipe: dict[str, Any]) -> None:
    try:
        there = json.loads(earlier)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is damaged ({error}); delete its folder to begin anew") from error
    if not isinstance(there, dict):
        raise ModelFormatError(f"{path} is damaged (no JSON object); delete its folder to begin anew")
    different = [name for name in recipe if there.get(name) != recipe[name]]
    if different:
        pairs = ", ".join(f"{name} {there.get(name)!r} instead of {recipe[name]!r}" for name in different)
        raise RequestError(
            f"{path.parent} is of another training ({pairs}); give the options of that training, choose another folder "
            f"({argument('work')}), or delete this one"
        )


def _values(recipe: Recipe) -> dict[str, Any]:
    return {"format": _FORMAT} | asdict(recipe) | {"taps": list(recipe.taps)}
