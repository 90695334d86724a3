"""edgedec serve: from its options to a server, and what a person sees of it."""

from edgedec.api.engine import Engine
from edgedec.errors import CancelledError, RuntimeUnavailableError
from edgedec.extras import install_command
from edgedec.gguf.trained_context import read_model_info
from edgedec.loading.resolve import resolve
from edgedec.memory.planner import REQUESTS
from edgedec.memory_plan import parse_size
from edgedec.progress import CancelToken
from edgedec.resolver import ResolveOptions
from edgedec_apps.cli.interrupts import TerminatedError, interruptible
from edgedec_apps.cli.opening import (
    open_model,
    restore_prompt_cache,
    room_bytes_of,
    serves_grammars,
    store_prompt_cache,
)
from edgedec_apps.cli.options import LoadFlags, OutputFlags
from edgedec_apps.cli.serve_options import ServeFlags
from edgedec_apps.cli.terminal import one_line, say
from edgedec_apps.texts import read_text


def run_server(model: str, load: LoadFlags, flags: ServeFlags) -> None:
    """Serve until Ctrl-C or SIGTERM, which ends a server in order: to a service manager that is a success.

    Raises:
        CancelledError: Ctrl-C ended it.
        RuntimeUnavailableError: starlette or uvicorn is not installed.
        EdgedecError: A setting makes no sense, the port is in use, or the model does not load.
    """
    try:
        from edgedec_apps.server.service import Loaded, ModelFile, Service
        from edgedec_apps.server.serving import address_of, open_socket, serve
        from edgedec_apps.server.settings import Settings
    except ModuleNotFoundError as error:
        raise RuntimeUnavailableError(
            f"edgedec serve needs the package {error.name!r}, which is not installed; get it with: "
            f"{install_command('server')}"
        ) from error
    output = OutputFlags(quiet=flags.quiet, verbose=flags.verbose)
    settings = Settings(
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
    listener = open_socket(settings)
    address = address_of(listener)

    def template(engine: Engine) -> str | None:
        return engine.card.chat_template if load.chat_template is None else read_text(load.chat_template)

    def loaded(cancel: CancelToken) -> Loaded:
        engine = open_model(
            model,
            load,
            output,
            cancel,
            n_parallel=settings.n_parallel,
            grammars=serves_grammars(),
            request_bytes=0 if load.memory is None else settings.room_bytes,
        )
        try:
            restore_prompt_cache(engine, load.prompt_cache)
            path = resolve(model, ResolveOptions(offline=True))
            file = ModelFile(path, read_model_info(path), path.stat().st_mtime, template(engine))
        except BaseException:
            engine.close()
            raise

        def close() -> None:
            store_prompt_cache(engine, load.prompt_cache)
            engine.close()

        planned = [term.n_bytes for term in engine.plan.terms if term.name == REQUESTS]
        return Loaded(engine, file, close, room_bytes=planned[0] if planned else None)

    def ready(service: Service) -> None:
        if not flags.quiet:
            say(f"edgedec: {one_line(service.name)} is ready at {address} (chat: /, OpenAI: /v1, ollama: /api)")

    def work(cancel: CancelToken) -> bool:
        serve(settings, listener, loaded, cancel, ready)
        return cancel.cancelled

    if not flags.quiet:
        say(f"edgedec: listening on {address}; the model is loading")
    try:
        interrupted = interruptible(work)
    except TerminatedError:
        return
    if interrupted:
        raise CancelledError("interrupted")
