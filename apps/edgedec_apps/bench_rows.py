"""Recorded drafts as a file: a head, then one JSON object a prompt."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec.engine import Engine
from edgedec.errors import RequestError, StorageError
from edgedec.gguf import read_gguf
from edgedec.model_info import describe
from edgedec.recording import Proposals
from edgedec_apps.bench_measure import RunOptions
from edgedec_apps.bench_prompts import BenchRequest

_KIND = "edgedec drafts 1"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A text, and what drafters proposed after each of its tokens.

    Attributes:
        id, task: The prompt's.
        token_ids: The generated tokens.
        proposals: One entry for every token but the last few.
    """

    id: str
    task: str
    token_ids: tuple[int, ...]
    proposals: tuple[Proposals, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """What a file of recorded drafts holds.

    Attributes:
        model: As it was named.
        n_bytes: Bytes of the model's weights.
        n_params: Its parameters.
        texts: A text each prompt.
    """

    model: str
    n_bytes: int
    n_params: int
    texts: tuple[Recorded, ...]


def head_of(model: str, path: Path) -> dict[str, Any]:
    """Return the first line of a file of rows."""
    found = describe(read_gguf(path))
    return {"kind": _KIND, "model": model, "n_bytes": found.n_bytes, "n_params": found.n_params}


def record(engine: Engine, requests: Iterable[BenchRequest], options: RunOptions) -> Iterator[dict[str, Any]]:
    """Decode every prompt plainly, and yield what drafters would have proposed; each starts with empty stores."""
    for request in requests:
        engine.forget()
        found = engine.record(request.token_ids, **options.sampling(request.seed))
        yield {
            "id": request.id,
            "task": request.task,
            "tokens": list(found.token_ids),
            "proposals": [row.as_dict() for row in found.proposals],
        }


def read_recording(path: Path) -> Recording:
    """Return what a file of rows holds.

    Raises:
        StorageError: It can't be read.
        RequestError: It is no such file, or a line (named) is damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no file of recorded drafts; make one with edgedec bench --rows") from error
    head = _parsed(lines[0], f"{path}, line 1") if lines else {}
    if head.get("kind") != _KIND:
        raise RequestError(f"{path} is no file of recorded drafts; make one with edgedec bench --rows")
    texts = [_text(_parsed(line, f"{path}, line {i}"), f"{path}, line {i}") for i, line in enumerate(lines[1:], 2)]
    if not texts:
        raise RequestError(f"{path} holds no prompt")
    try:
        return Recording(str(head["model"]), int(head["n_bytes"]), int(head["n_params"]), tuple(texts))
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{path}, line 1: no such head as edgedec bench --rows writes ({error})") from error


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
        found = Recorded(str(row["id"]), str(row["task"]), token_ids, proposals)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{where}: no such row as edgedec bench --rows writes ({error!r})") from error
    if len(proposals) < len(token_ids) - 2:
        raise RequestError(f"{where}: {len(token_ids)} tokens with proposals for {len(proposals)}")
    return found


def _proposals(entry: dict[str, Any]) -> Proposals:
    tokens = tuple(int(token) for token in entry["tokens"])
    parents = tuple(int(parent) for parent in entry["parents"])
    paths = tuple(float(path) for path in entry["paths"])
    if not len(tokens) == len(parents) == len(paths):
        raise ValueError("tokens, parents and paths have several lengths")
    if not all(-1 <= parent < node for node, parent in enumerate(parents)) or not all(0 <= p <= 1 for p in paths):
        raise ValueError("a parent stands after its child, or a path is no probability")
    return Proposals(tokens, parents, paths, float(entry["draft_s"]))
