"""edgedec serve: the options of a server, and what a person sees of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from edgedec.errors import CancelledError, RuntimeUnavailableError
from edgedec.extras import install_command
from edgedec.memory_plan import parse_size
from edgedec.progress import CancelToken
from edgedec.resolver import ResolveOptions
from edgedec_apps.cli.interrupts import TerminatedError, interruptible
from edgedec_apps.cli.options import LoadFlags, ModelName, OutputFlags, Quiet, option, output_option
from edgedec_apps.cli.terminal import one_line, say
from edgedec_apps.texts import read_text

if TYPE_CHECKING:
    from edgedec_apps.server.service import Loaded, Service
    from edgedec_apps.server.settings import Settings

_SERVER = "Server"


@dataclass(frozen=True)
class ServeFlags:
    """The options of the server."""

    host: Annotated[str, option("--host", help="The address to listen on.", metavar="HOST", panel=_SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[int, option("--port", help="The port; 0 takes a free one.", metavar="N", panel=_SERVER)] = 8080
    api_key: Annotated[
        str | None,
        option(
            "--api-key",
            help="The key that requests must have; its variable is safer, as process lists show options.",
            metavar="KEY",
            panel=_SERVER,
        ),
    ] = None
    no_auth: Annotated[
        bool, option("--no-auth", help="Allow other machines to use the server without a key.", panel=_SERVER)
    ] = False
    cors: Annotated[
        list[str] | None,
        option(
            "--cors", help="Web origin whose pages may use the server. Repeatable.", metavar="ORIGIN", panel=_SERVER
        ),
    ] = None
    alias: Annotated[
        list[str] | None,
        option("--alias", help="A further name of the model in requests. Repeatable.", metavar="NAME", panel=_SERVER),
    ] = None
    parallel: Annotated[
        int, option("--parallel", help="Most requests that run at once.", metavar="N", panel=_SERVER)
    ] = 1
    queue: Annotated[
        int,
        option(
            "--queue", help="Most requests that wait; further ones are answered with 429.", metavar="N", panel=_SERVER
        ),
    ] = 16
    timeout: Annotated[
        float, option("--timeout", help="Most seconds of a request, including its wait.", metavar="X", panel=_SERVER)
    ] = 600.0
    max_body: Annotated[
        str, option("--max-body", help="Most bytes of a request's body.", metavar="SIZE", panel=_SERVER)
    ] = "8MB"
    header_timeout: Annotated[
        float,
        option(
            "--header-timeout", help="Most seconds until a request's header is complete.", metavar="X", panel=_SERVER
        ),
    ] = 10.0
    body_timeout: Annotated[
        float,
        option("--body-timeout", help="Most seconds until a request's body is complete.", metavar="X", panel=_SERVER),
    ] = 30.0
    connections: Annotated[
        int,
        option(
            "--connections",
            help="Most connections; beyond them, connections without a request are closed.",
            metavar="N",
            panel=_SERVER,
        ),
    ] = 512
    per_address: Annotated[
        int, option("--per-address", help="Most connections of one address.", metavar="N", panel=_SERVER)
    ] = 256
    quiet: Quiet = False
    verbose: Annotated[
        bool, output_option("--verbose", "-v", help="Print requests (never their texts) and the runtimes' log.")
    ] = False


def command(model: ModelName, *, load: LoadFlags, server: ServeFlags) -> None:
    """Serve a model over HTTP: OpenAI's and ollama's interfaces, and a web chat at /.

    Only this machine can reach it unless --host says otherwise. Ctrl-C ends it with exit code 130, SIGTERM with 0.
    """
    try:
        from edgedec_apps.server.serving import address_of, open_socket, serve
    except ModuleNotFoundError as error:
        raise RuntimeUnavailableError(
            f"edgedec serve needs the package {error.name!r}, which is not installed; install it with: "
            f"{install_command('server')}"
        ) from error
    settings = _settings(model, load, server)
    listener = open_socket(settings)
    address = address_of(listener)

    def ready(service: "Service") -> None:
        if not server.quiet:
            say(f"edgedec: {one_line(service.name)} is ready at {address} (chat: /, OpenAI: /v1, ollama: /api)")

    def work(cancel: CancelToken) -> bool:
        serve(settings, listener, lambda loading: _load(settings, load, server, loading), cancel, ready)
        return cancel.cancelled

    if not server.quiet:
        say(f"edgedec: listening on {address}; the model is loading")
    try:
        interrupted = interruptible(work)
    except TerminatedError:  # a service manager ends a server with SIGTERM, and takes exit code 0 for a success
        return
    if interrupted:
        raise CancelledError("interrupted")


def _settings(model: str, load: LoadFlags, flags: ServeFlags) -> "Settings":
    """Return the server's settings (RequestError where one is out of range)."""
    from edgedec_apps.cli.opening import room_bytes_of
    from edgedec_apps.server.settings import Settings

    return Settings(
        model=model,
        host=flags.host,
        port=flags.port,
        aliases=tuple(flags.alias or ()),
        api_key=flags.api_key,
        no_auth=flags.no_auth,
        origins=tuple(flags.cors or ()),
        n_parallel=flags.parallel,
        n_queue=flags.queue,
        timeout_s=flags.timeout,
        header_timeout_s=flags.header_timeout,
        body_timeout_s=flags.body_timeout,
        max_body_bytes=parse_size(flags.max_body),
        n_connections=flags.connections,
        n_per_address=flags.per_address,
        room_bytes=room_bytes_of(load),
        offline=load.offline,
    )


def _load(settings: "Settings", load: LoadFlags, flags: ServeFlags, cancel: CancelToken) -> "Loaded":
    """Load the model for a server, with what the server tells of its file (EdgedecError as edgedec.load)."""
    from edgedec.gguf.trained_context import read_model_info
    from edgedec.loading.resolve import resolve
    from edgedec.memory.planner import REQUESTS
    from edgedec_apps.cli.opening import open_model, restore_prompt_cache, serves_grammars, store_prompt_cache
    from edgedec_apps.server.service import Loaded, ModelFile

    engine = open_model(
        settings.model,
        load,
        OutputFlags(quiet=flags.quiet, verbose=flags.verbose),
        cancel,
        n_parallel=settings.n_parallel,
        grammars=serves_grammars(),
        request_bytes=0 if load.memory is None else settings.room_bytes,
    )

    def close() -> None:
        store_prompt_cache(engine, load.prompt_cache)
        engine.close()

    try:
        restore_prompt_cache(engine, load.prompt_cache)
        path = resolve(settings.model, ResolveOptions(offline=True))
        template = engine.card.chat_template if load.chat_template is None else read_text(load.chat_template)
        file = ModelFile(path, read_model_info(path), path.stat().st_mtime, template)
    except BaseException:
        engine.close()
        raise
    planned = [term.n_bytes for term in engine.plan.terms if term.name == REQUESTS]
    return Loaded(engine, file, close, room_bytes=planned[0] if planned else None)
