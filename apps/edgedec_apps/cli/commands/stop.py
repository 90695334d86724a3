"""edgedec stop: unload a model from a running server."""

from typing import Annotated

import typer

from edgedec_apps.cli.options import Quiet
from edgedec_apps.cli.server_client import Address, ask
from edgedec_apps.cli.shown.terminal import one_line, say


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that edgedec ps shows.", show_default=False)],
    *,
    server: Address,
    quiet: Quiet = False,
) -> None:
    """Unload a model from a running server, after its requests have ended.

    The next request for it loads it again. edgedec ps lists what is loaded.
    """
    ask("POST", server, "/api/generate", {"model": model, "keep_alive": 0})
    if not quiet:
        say(f"edgedec: {one_line(model)} is unloaded")
