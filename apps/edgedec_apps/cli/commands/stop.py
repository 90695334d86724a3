"""edgedec stop: unload a model from a running server."""

from typing import Annotated

from edgedec_apps.cli.declared import argument
from edgedec_apps.cli.options import Quiet
from edgedec_apps.cli.server_client import Address, ask
from edgedec_apps.cli.shown.terminal import one_line, say


def command(
    model: Annotated[str, argument("MODEL", "A name that edgedec ps shows.")],
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
