"""edgedec pull, list and rm: the models on this machine."""

import json
import os

from edgedec.memory import format_bytes
from edgedec.progress import CancelToken
from edgedec.resolver import ResolveOptions
from edgedec_apps.cli.terminal import ProgressLine, interruptible, neutral, say
from edgedec_models.cache import CachedModel, list_models, remove_model
from edgedec_models.catalogue import load_catalogue
from edgedec_models.resolve import pull


def pull_model(model: str, *, force: bool, offline: bool, quiet: bool, as_json: bool) -> None:
    """Fetch a model with progress, and say where it is."""

    def work(cancel: CancelToken) -> str:
        with ProgressLine(quiet=quiet) as on_progress:
            options = ResolveOptions(offline=offline, on_progress=on_progress, cancel=cancel)
            return os.fspath(pull(model, options, force=force))

    path = interruptible(work)
    if as_json:
        print(json.dumps({"model": model, "path": path}))
    elif not quiet:
        say(f"{model}: {path}")


def print_models(*, as_json: bool) -> None:
    """Print the models on this machine, and those that the catalogue can fetch."""
    models = list_models()
    here = {model.name for model in models if model.complete}
    catalogue = load_catalogue()
    if as_json:
        print(
            json.dumps(
                {
                    "models": [_document(model) for model in models],
                    "catalogue": [
                        {"name": entry.name, "size_bytes": entry.size_bytes, "note": entry.note}
                        for entry in catalogue.values()
                    ],
                },
                ensure_ascii=False,
            )
        )
        return
    rows: list[tuple[str, str, str]] = [
        (model.name, format_bytes(model.size_bytes), model.origin if model.complete else "incomplete; pull resumes")
        for model in models
    ]
    rows += [
        (entry.name, format_bytes(entry.size_bytes), f"to pull: {entry.note}")
        for entry in catalogue.values()
        if entry.name not in here
    ]
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, size, note in rows:
        print(neutral(f"{name:{width}}  {size:>9}  {note}"))


def _document(model: CachedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "path": os.fspath(model.path),
        "size_bytes": model.size_bytes,
        "origin": model.origin,
        "complete": model.complete,
    }


def delete_model(model: str) -> None:
    """Delete a model from the cache and say what that freed."""
    say(f"{model}: {format_bytes(remove_model(model))} freed")
