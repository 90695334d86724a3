"""Files of recorded drafts: a head, then one JSON object for each prompt."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from edgedec.api.engine import Engine
from edgedec.gguf.file import read_gguf
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.gguf.model_info import describe
from edgedec.model import LayerSet
from edgedec.progress import OnProgress, Progress
from edgedec_apps.bench.measure import RunOptions
from edgedec_apps.bench.prompts import BenchRequest
from edgedec_apps.bench.recorder import Recorder, record_text

_KIND = "edgedec drafts 1"


def head_of(model: str, path: Path, draft_model: Path | None = None) -> dict[str, Any]:
    """Return the first line of a file of recorded drafts, for the files of the model and the draft model."""
    drafts = None if draft_model is None else _size(draft_model)
    return {"kind": _KIND, "model": model, **_size(path), "draft_model": drafts}


def _size(path: Path) -> dict[str, int]:
    """Return the bytes of a model's weights and its number of parameters: what a forward reads and computes."""
    model = describe(read_gguf(path))
    return {"n_bytes": model.n_bytes, "n_params": model.n_params}


def record(
    engine: Engine,
    requests: Sequence[BenchRequest],
    options: RunOptions,
    path: Path,
    *,
    on_progress: OnProgress | None = None,
) -> Iterator[dict[str, Any]]:
    """Decode every prompt without drafts, and yield what the drafters propose after each token.

    Before each prompt the KV cache and the drafters' stores are emptied. `path` is the model's file, for the bytes of
    its layers.
    """
    share = _shares(path)
    for i, request in enumerate(requests):
        if on_progress is not None:
            on_progress(Progress("recording drafts", i, len(requests), "prompts"))
        other = int(request.token_ids[0] == 0)  # a text with another first token empties the KV cache
        engine.generate([other], max_tokens=1, temperature=0.0, draft=False)
        engine.forget()
        recorder = Recorder(share)
        found = record_text(engine, request.token_ids, recorder, **options.sampling(request.seed))
        yield {
            "id": request.id,
            "task": request.task,
            "n_prompt_tokens": len(request.token_ids),
            "tokens": list(found.token_ids),
            "proposals": [row.as_dict() for row in recorder.rows],
        }
    if on_progress is not None:
        on_progress(Progress("recording drafts", len(requests), len(requests), "prompts"))


def _shares(path: Path) -> Callable[[LayerSet], float]:
    """Return a function for the share of a token's bytes that a set reads; its first call reads the file."""
    sizes = cache(partial(layer_bytes, path))
    return lambda layers: sizes().share(layers)
