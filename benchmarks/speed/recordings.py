"""Reads the files of edgedec bench --rows, which hold recorded drafts: a head, then one JSON object for each prompt."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec.errors import RequestError, StorageError
from edgedec_apps.bench.recorder import Evaluated, Proposals

_KIND = "edgedec drafts 1"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model: what a forward reads and computes.

    Attributes:
        n_bytes: Bytes of the weights.
        n_params: Number of parameters.
    """

    n_bytes: int
    n_params: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A text, and what drafters proposed after each of its tokens.

    Attributes:
        id, task: The id and the task of the prompt.
        token_ids: The generated tokens.
        proposals: The proposals after every token except the last few.
        n_prompt_tokens: Tokens of the prompt; 0 in older files, which lack it.
    """

    id: str
    task: str
    token_ids: tuple[int, ...]
    proposals: tuple[Proposals, ...]
    n_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """The content of a file of recorded drafts.

    Attributes:
        model: The model's name.
        size: The size of the model.
        draft_model: The size of the draft model; None without one.
        charged: Whether the file has the forwards that drafting made; older files lack them.
        texts: A text for each prompt.
    """

    model: str
    size: ModelSize
    draft_model: ModelSize | None
    charged: bool
    texts: tuple[Recorded, ...]


def read_recording(path: Path) -> Recording:
    """Return the content of a file of recorded drafts.

    Raises:
        StorageError: The file can't be read.
        RequestError: The file is not one of recorded drafts, or a line is damaged; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not a file of recorded drafts; make one with edgedec bench --rows") from error
    head = _parsed(lines[0], f"{path}, line 1") if lines else {}
    if head.get("kind") != _KIND:
        raise RequestError(f"{path} is not a file of recorded drafts; make one with edgedec bench --rows")
    rows = [_parsed(line, f"{path}, line {i}") for i, line in enumerate(lines[1:], 2)]
    texts = tuple(_text(row, f"{path}, line {i}") for i, row in enumerate(rows, 2))
    if not texts:
        raise RequestError(f"{path} holds no prompt")
    charged = all("evaluated" in entry for row in rows for entry in row["proposals"])
    try:
        drafts = head.get("draft_model")
        size, draft_model = _as_size(head), None if drafts is None else _as_size(drafts)
        recording = Recording(str(head["model"]), size, draft_model, charged, texts)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{path}, line 1: no such head as edgedec bench --rows writes ({error})") from error
    if draft_model is None and any(made.share is None for made in _evaluated(texts)):
        raise RequestError(f"{path}, line 1: no draft model, whose forwards the lines below have; record it again")
    return recording


def _as_size(head: dict[str, Any]) -> ModelSize:
    found = ModelSize(int(head["n_bytes"]), int(head["n_params"]))
    if found.n_bytes < 1 or found.n_params < 1:
        raise ValueError("n_bytes and n_params must be above 0")
    return found


def _evaluated(texts: Iterable[Recorded]) -> Iterator[Evaluated]:
    return (made for text in texts for row in text.proposals for made in row.evaluated)


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: no JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def _text(row: dict[str, Any], where: str) -> Recorded:
    try:
        token_ids = tuple(int(token) for token in row["tokens"])
        proposals = tuple(_proposals(entry) for entry in row["proposals"])
        n_prompt = int(row.get("n_prompt_tokens", 0))
        found = Recorded(str(row["id"]), str(row["task"]), token_ids, proposals, n_prompt)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{where}: no such row as edgedec bench --rows writes ({error!r})") from error
    if len(proposals) < len(token_ids) - 2:
        raise RequestError(f"{where}: {len(token_ids)} tokens with proposals for {len(proposals)}")
    return found


def _proposals(entry: dict[str, Any]) -> Proposals:
    tokens = tuple(int(token) for token in entry["tokens"])
    parents = tuple(int(parent) for parent in entry["parents"])
    paths = tuple(float(path) for path in entry["paths"])
    evaluated = tuple(_forward(*made) for made in entry.get("evaluated", ()))
    after = tuple(int(n) for n in entry.get("after", [0] * len(tokens)))
    if not len(tokens) == len(parents) == len(paths) == len(after):
        raise ValueError("tokens, parents, paths and after have several lengths")
    if not all(-1 <= parent < node for node, parent in enumerate(parents)) or not all(0 <= p <= 1 for p in paths):
        raise ValueError("a parent stands after its child, or a path is no probability")
    if not all(0 <= n <= len(evaluated) for n in after):
        raise ValueError("a node was known after more forwards than were made")
    return Proposals(tokens, parents, paths, float(entry["draft_s"]), evaluated, after)


def _forward(n_rows: int, share: float | None) -> Evaluated:
    found = Evaluated(int(n_rows), None if share is None else float(share))
    if found.n_rows < 1 or not (found.share is None or 0 <= found.share <= 1):
        raise ValueError("a forward has no row, or reads a share of the weights that is none")
    return found
