"""The options of edgedec serve, beside those of the model."""

from dataclasses import dataclass
from typing import Annotated

from edgedec_apps.cli.options import Quiet, option, output_option

_SERVER = "Server"


@dataclass(frozen=True)
class ServeFlags:
    """Where the server listens, who may ask, and how much it takes."""

    host: Annotated[str, option("--host", help="Address to listen on.", metavar="HOST", panel=_SERVER)] = "127.0.0.1"
    port: Annotated[int, option("--port", help="Port; 0 takes a free one.", metavar="N", panel=_SERVER)] = 8080
    api_key: Annotated[
        str | None,
        option(
            "--api-key",
            help="Key that requests must bring; better given by its variable, which no process list shows.",
            metavar="KEY",
            panel=_SERVER,
        ),
    ] = None
    no_auth: Annotated[bool, option("--no-auth", help="Listen beyond this machine without a key.", panel=_SERVER)] = (
        False
    )
    cors: Annotated[
        list[str] | None,
        option("--cors", help="Web origin whose pages may ask. Repeatable.", metavar="ORIGIN", panel=_SERVER),
    ] = None
    alias: Annotated[
        list[str] | None,
        option("--alias", help="Further name of the model in requests. Repeatable.", metavar="NAME", panel=_SERVER),
    ] = None
    parallel: Annotated[
        int, option("--parallel", help="Requests that are worked on at once.", metavar="N", panel=_SERVER)
    ] = 1
    queue: Annotated[
        int, option("--queue", help="Requests that may wait; beyond them: 429.", metavar="N", panel=_SERVER)
    ] = 16
    timeout: Annotated[
        float, option("--timeout", help="Most seconds of a request, waiting included.", metavar="X", panel=_SERVER)
    ] = 600.0
    max_body: Annotated[
        str, option("--max-body", help="Most bytes of a request's body.", metavar="SIZE", panel=_SERVER)
    ] = "8MB"
    header_timeout: Annotated[
        float, option("--header-timeout", help="Most seconds for a request's header.", metavar="X", panel=_SERVER)
    ] = 10.0
    body_timeout: Annotated[
        float, option("--body-timeout", help="Most seconds for a request's body.", metavar="X", panel=_SERVER)
    ] = 30.0
    connections: Annotated[
        int,
        option(
            "--connections",
            help="Connections at once; beyond them, those that ask nothing are closed.",
            metavar="N",
            panel=_SERVER,
        ),
    ] = 512
    per_address: Annotated[
        int, option("--per-address", help="The same, of one address.", metavar="N", panel=_SERVER)
    ] = 256
    quiet: Quiet = False
    verbose: Annotated[
        bool, output_option("--verbose", "-v", help="Show requests (never their texts) and the runtimes' log.")
    ] = False
