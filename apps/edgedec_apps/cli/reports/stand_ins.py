"""Models that are not on this machine, planned for by their headers, before anything is downloaded."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edgedec.load_options import ResolveOptions
from edgedec.progress import CancelToken
from edgedec_apps.cli.draft_options import Drafting, drafting_of
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.method_keys import model_keys
from edgedec_apps.cli.methods import asked_methods
from edgedec_apps.cli.options import LoadFlags
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import say
from edgedec_models.fetching.offline import NeedsDownloadError
from edgedec_models.stand_in import model_or_stand_in

_NOTE = "planned by the header alone: a draft head, which is found by a model's weights, is not counted"


@contextmanager
def stand_ins(model: str, flags: LoadFlags, *, quiet: bool) -> Iterator[tuple[str, LoadFlags, str]]:
    """Yield a model's name, the flags and a note; a stand-in is in place of each model that is not on this machine.

    Where a header can't be had by itself, a person at a terminal is asked whether the model may be downloaded.

    Raises:
        NeedsDownloadError: The person says no, or there is nobody to ask.
        EdgedecError: As model_or_stand_in.
    """
    with tempfile.TemporaryDirectory(prefix="edgedec-") as root:
        here = _stand_in(model, flags, Path(root, "model"), quiet=quiet)
        drafts, methods = list(flags.draft_option or ()), list(flags.method or ())
        if (draft := drafting_of(drafts).model) is not None:
            drafts.append(f"model={_stand_in(str(draft), flags, Path(root, 'draft'), quiet=quiet)}")
        for method, values in asked_methods(methods, "load").items():
            for key in model_keys(method.keys or Drafting):
                if (other := values.get(key)) is not None:
                    path = _stand_in(str(other), flags, Path(root, method.name), quiet=quiet)
                    methods.append(f'{method.name}:{key}="{path}"')
        note = _NOTE if Path(here).is_relative_to(root) else ""
        found = replace(flags, draft_option=drafts, method=methods)
        yield here, found, note


def _stand_in(model: str, flags: LoadFlags, folder: Path, *, quiet: bool) -> str:
    folder.mkdir()

    def work(cancel: CancelToken) -> str:
        with ProgressLine(quiet=quiet) as on_progress:
            options = ResolveOptions(offline=flags.offline, on_progress=on_progress, cancel=cancel)
            return str(model_or_stand_in(model, options, folder))

    try:
        return interruptible(work)
    except NeedsDownloadError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty() and _agrees(error)):
            raise
        return model


def _agrees(error: NeedsDownloadError) -> bool:
    """Ask a person at the terminal whether a model may be downloaded, and return the answer."""
    say(f"edgedec: {error}")
    sys.stderr.write("Download it now? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
