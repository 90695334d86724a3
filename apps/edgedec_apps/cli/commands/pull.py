"""edgedec pull: download a model or a draft head."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

from edgedec.errors import ModelError, PullError, RequestError, StorageError
from edgedec.gguf.places import standing
from edgedec.load_options import ResolveOptions
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec_apps.cli.declared import model_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, ModelName, Offline, Quiet
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line, say, write_json
from edgedec_models.resolve import pull
from edgedec_runtimes.tile_files.record import is_tiled


def command(
    model: ModelName,
    *,
    force: bool = model_flag("--force", "Check the files again, and download damaged ones anew.", False),
    keep_file: bool | None = model_flag(
        "--keep-file/--no-keep-file",
        "Keep the GGUF, for other programs, or let tiles take its place (default: as before, at first no).",
    ),
    head: bool | None = model_flag(
        "--head/--no-head",
        "Download the draft head that the catalogue has for the model (default: one that comes with it).",
    ),
    offline: Offline = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Download a model or a draft head, or resume its download, and check it.

    When a model first runs on the cpu runtime, tiles take the place of its GGUF: the same bits in another order, which
    make starts fast. The GGUF is made again, bit for bit, where another runtime needs it, and by --keep-file.
    """

    def work(cancel: CancelToken) -> tuple[Path, Path | None, str]:
        with ProgressLine(quiet=quiet) as on_progress:
            said = partial(_say_size, model, bool(keep_file), set[str]()) if not quiet else None
            options = ResolveOptions(offline=offline, on_progress=_both(said, on_progress), cancel=cancel)
            path = pull(model, options, force=force, with_head=False)
            options = replace(options, on_progress=on_progress)
            head_file, note = (
                (None, "") if head is False else _head(model, path, options, force=force, is_asked=bool(head))
            )
            if keep_file is None:
                return path, head_file, note
            from edgedec_runtimes.tile_files.keeping import let_tiles_replace, make_whole  # here, as it imports numpy

            if keep_file:
                make_whole(path, keep=True, on_progress=on_progress, cancel=cancel)
            else:
                let_tiles_replace(path)
            return path, head_file, note

    path, head_file, note = interruptible(work)
    if as_json:
        write_json({"model": model, "path": os.fspath(standing(path)), "head": head_file and os.fspath(head_file)})
    elif not quiet:
        remark = " (tiles, which other programs can't read; --keep-file makes the GGUF again)" if is_tiled(path) else ""
        say(f"{model}: {standing(path)}{remark}")
    if note and not quiet:
        say(one_line(f"{model}: {note}"))


def _head(model: str, path: Path, options: ResolveOptions, *, force: bool, is_asked: bool) -> tuple[Path | None, str]:
    """Return the draft head that a model of the catalogue is used with, fetched where it should be, and what to say.

    Raises:
        RequestError: A head is asked for, and the catalogue has none.
        EdgedecError: A head is asked for, and could not be fetched.
    """
    from edgedec_apps.cli.reports.expectations import head_line
    from edgedec_models.catalogue import find_model
    from edgedec_models.model_heads import bring_head

    entry = find_model(model)
    line = None if entry is None else head_line(entry)
    if entry is None or entry.head is None or line is None:
        if is_asked:
            raise RequestError(f"the catalogue has no draft head for {model}; leave --head out, or pull hf:OWNER/REPO")
        return None, ""
    try:
        head = bring_head(entry, path, options, force=force)
    except (ModelError, PullError, StorageError) as error:
        if is_asked:
            raise
        return None, f"its draft head could not be fetched: {error}"
    if is_asked and entry.head.reference is not None and (force or head is None):
        from edgedec_apps.published_heads import make_head

        head = make_head(entry, entry.head.reference, path, options)
    if head is not None:
        return head, f"drafts with {head}"
    return None, f"{line}; edgedec pull {model} --head fetches this draft head"


def _both(first: OnProgress | None, second: OnProgress) -> OnProgress:
    def report(progress: Progress) -> None:
        if first is not None:
            first(progress)
        second(progress)

    return report


def _say_size(model: str, keep_file: bool, said: set[str], progress: Progress) -> None:
    """Say once for each file, before its bytes come, what will lie on the disk in all."""
    from edgedec_models.catalogue import CheckpointSource, find_model

    if progress.phase != "download" or progress.total is None or progress.detail in said:
        return
    said.add(progress.detail)
    entry, later = find_model(model), "once it has run on the cpu runtime, for tiles"
    if entry is not None and isinstance(entry.sources[0], CheckpointSource):
        later = f"to download, of which {format_bytes(entry.size_bytes or 0)} are made"
    else:
        if not keep_file:
            later = "for a moment when it first runs on the cpu runtime, until tiles take its place"
        later = f"on the disk, and as much again {later}"
    say(f"{model}: {format_bytes(progress.total)} {later}")
    ProgressLine.said_at = monotonic()  # a pipe gets no other line at the beginning
