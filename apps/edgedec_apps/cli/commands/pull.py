"""edgedec pull: download a model or a draft head."""

import os
from typing import Annotated

from edgedec.progress import CancelToken
from edgedec.resolver import ResolveOptions
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, ModelName, Offline, Quiet, model_option
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.terminal import say, write_json
from edgedec_models.resolve import pull


def command(
    model: ModelName,
    *,
    force: Annotated[
        bool, model_option("--force", help="Check the files again, and download damaged ones anew.")
    ] = False,
    offline: Offline = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Download a model or a draft head, or resume its download, and check it."""

    def work(cancel: CancelToken) -> str:
        with ProgressLine(quiet=quiet) as on_progress:
            options = ResolveOptions(offline=offline, on_progress=on_progress, cancel=cancel)
            return os.fspath(pull(model, options, force=force))

    path = interruptible(work)
    if as_json:
        write_json({"model": model, "path": path})
    elif not quiet:
        say(f"{model}: {path}")
