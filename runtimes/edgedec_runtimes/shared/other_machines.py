"""What runtimes say that put no layers on other machines."""

from edgedec.errors import RequestError, argument
from edgedec.model import LoadOptions


def refuse_servers(options: LoadOptions, runtime: str) -> None:
    """Raise RequestError where the options name servers on which layers are to lie."""
    if options.rpc_servers:
        raise RequestError(
            f"the {runtime} runtime puts no layers on other machines; use the llamacpp runtime, or leave "
            f"{argument('rpc')} out"
        )
