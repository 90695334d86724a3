"""edgedec serve: the options of a server, and what a person sees of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edgedec.errors import CancelledError, RequestError
from edgedec.memory_plan import parse_size
from edgedec.progress import CancelToken, OnProgress
from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import argument, output_flag, server_flag
from edgedec_apps.cli.interrupts import TerminatedError, interruptible
from edgedec_apps.cli.options import LoadFlags, Quiet, ToolFlags
from edgedec_apps.cli.shown.log import show_log, telling_of_losses, warnings_of
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line, say

if TYPE_CHECKING:
    from edgedec_apps.server.core.service import OfferedTools, Service
    from edgedec_apps.server.core.settings import Settings
    from edgedec_apps.server.registry.opener import Opener
    from edgedec_apps.tools.configuration import Server


@dataclass(frozen=True)
class ServeFlags:
    """The options of the server."""

    host: str = server_flag("--host HOST", "The address to listen on.", "127.0.0.1")
    port: int = server_flag("--port N", "The port; 0 takes a free one.", 8080)
    api_key: str | None = server_flag(
        "--api-key KEY",
        "The key that requests must have; its variable is safer, as process lists show options.",
    )
    tls_cert: Path | None = server_flag(
        "--tls-cert FILE",
        "File of the certificate (PEM, with what signed it) to serve HTTPS with; needs --tls-key.",
    )
    tls_key: Path | None = server_flag("--tls-key FILE", "File of the certificate's key (PEM).")
    no_auth: bool = server_flag("--no-auth", "Allow other machines to use the server without a key.", False)
    cors: list[str] | None = server_flag("--cors ORIGIN", "Web origin whose pages may use the server. Repeatable.")
    allow_host: list[str] | None = server_flag("--allow-host NAME", "Name that a Host header may have. Repeatable.")
    alias: list[str] | None = server_flag("--alias NAME", "A further name of the first MODEL in requests. Repeatable.")
    image_hosts: str | None = server_flag(
        "--image-hosts A.B,C.D",
        "Hosts from which pictures of requests may be fetched, by https (default: none).",
    )
    keep_billing_header: bool = server_flag(
        "--keep-billing-header",
        "Leave the line for bills in the prompts of Claude Code, which no kept prompt fits then.",
        False,
    )
    keep_answers: bool = server_flag("--keep-answers", "Keep answers in the cache, for `edgedec learn --head`.", False)
    check: list[str] | None = server_flag(
        "--check NAME=COMMAND",
        "A check that requests may name in `refine`, and the command that it runs. Repeatable.",
    )
    keep_alive: str = server_flag(
        "--keep-alive TIME",
        "How long a model that is no MODEL above stays loaded without requests: 30s, 5m, -1 for ever.",
        "5m",
    )
    parallel: int = server_flag("--parallel N", "Most requests of a model that run at once.", 1)
    texts: int = server_flag(
        "--texts N",
        "Texts of one prompt (n, best_of), each as long as the context, that --memory keeps room for.",
        1,
    )
    queue: int = server_flag("--queue N", "Most requests of a model that wait; further ones are answered with 429.", 16)
    timeout: float = server_flag("--timeout X", "Most seconds of a request, including its wait.", 600.0)
    max_body: str = server_flag("--max-body SIZE", "Most bytes of a request's body.", "8MB")
    header_timeout: float = server_flag(
        "--header-timeout X", "Most seconds until a request's header is complete.", 10.0
    )
    body_timeout: float = server_flag("--body-timeout X", "Most seconds until a request's body is complete.", 30.0)
    connections: int = server_flag(
        "--connections N",
        "Most connections; beyond them, connections without a request are closed.",
        512,
    )
    per_address: int = server_flag("--per-address N", "Most connections of one address.", 256)
    quiet: Quiet = False
    verbose: bool = output_flag("--verbose -v", "Print requests (never their texts) and the runtimes' log.", False)


ModelNames = Annotated[
    list[str] | None,
    argument(
        "[MODEL]...",
        "Models to load at the start, as many as fit together; all others on this machine are loaded on demand.",
        complete=completion.any_model,
    ),
]


def command(models: ModelNames = None, *, load: LoadFlags, server: ServeFlags, tools: ToolFlags) -> None:
    """Serve models over HTTP: OpenAI's and ollama's interfaces, and a web chat at /.

    A request may name any model on this machine. It is loaded then, and where memory is short the least recently used
    one is unloaded; --memory is for all of them together. Options of drafts, layers and templates are for the models of
    the command line.

    With --mcp the web chat may use tools of other programs: they run here, and the page asks before each call. Who may
    use the server may run them.

    Only this machine can reach the server unless --host says otherwise. Ctrl-C ends it with exit code 130, SIGTERM with
    0.
    """
    from edgedec_apps.server.serving import address_of, open_socket, serve

    servers = _tool_servers(server, tools)
    settings = _settings(tuple(models or ()), load, server)
    opener = _opener(settings, load, server)
    listener = open_socket(settings)
    address = address_of(listener, tls=settings.tls is not None)

    def ready(service: "Service") -> None:
        if not server.quiet:
            names = [entry.name for entry in service.names.served if service.registry.entry(entry.recipe).loaded]
            loaded = f"; loaded: {', '.join(map(one_line, names))}" if names else ""
            say(f"edgedec: the server is ready at {address} (chat: /, OpenAI: /v1, ollama: /api){loaded}")

    def work(cancel: CancelToken) -> bool:
        with _offered(servers, tools) as offer:
            serve(settings, listener, opener.prepare, cancel, ready, offer)
        return cancel.cancelled

    if not server.quiet:
        say(f"edgedec: listening on {address}{'; the model is loading' if settings.models else ''}")
    try:
        with telling_of_losses(quiet=server.quiet):
            interrupted = interruptible(work)
    except TerminatedError:  # a service manager ends a server with SIGTERM, and takes exit code 0 for a success
        return
    if interrupted:
        raise CancelledError("interrupted")


def _tool_servers(server: ServeFlags, tools: ToolFlags) -> "tuple[Server, ...]":
    """Return the tool servers of the web chat: those of --mcp (RequestError where anybody might use them)."""
    from edgedec_apps.tools.configuration import configured

    servers = () if tools.mcp is None else configured(tools.mcp)
    if servers and server.no_auth:
        raise RequestError("--mcp lets whoever may use the server run its tools: give --api-key KEY, not --no-auth")
    return servers


@contextmanager
def _offered(configurations: "tuple[Server, ...]", flags: ToolFlags) -> "Iterator[OfferedTools | None]":
    """Yield the tools of tool servers, which connect meanwhile; say which can't be used. None for no servers."""
    if not configurations:
        yield None
        return
    from edgedec_apps.server.core.service import OfferedTools
    from edgedec_apps.tools.offered import patterns_of
    from edgedec_apps.tools.servers import ToolServers

    servers = ToolServers(configurations)
    servers.when_listed(lambda notes: say("\n".join(f"edgedec: {one_line(note)}" for note in notes)) if notes else None)
    try:
        yield OfferedTools(servers, patterns_of(flags.allow_tools))
    finally:
        servers.close()


def _settings(models: tuple[str, ...], load: LoadFlags, flags: ServeFlags) -> "Settings":
    """Return the server's settings (RequestError where one is out of range, or is for one model and there are more)."""
    from edgedec_apps.cli.draft_options import drafting_of, require_no_rule
    from edgedec_apps.cli.opening import room_bytes_of
    from edgedec_apps.server.core.settings import Settings
    from edgedec_apps.server.registry.models import keep_seconds
    from edgedec_apps.tls import server_context

    if len(set(models)) != len(models):
        raise RequestError("a model is named twice; name each once")
    drafting = drafting_of(load.draft_option)
    require_no_rule(drafting)
    if drafting.store is not None and len(models) > 1:
        raise RequestError("--draft-option store is a file of one model; name one model, or leave it out")
    return Settings(
        models=models,
        host=flags.host,
        port=flags.port,
        aliases=tuple(flags.alias or ()),
        api_key=flags.api_key,
        no_auth=flags.no_auth,
        hosts=tuple(name.lower() for name in flags.allow_host or ()),
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
        keep_s=keep_seconds(flags.keep_alive, "--keep-alive"),
        tls=server_context(flags.tls_cert, flags.tls_key),
        checks=_checks(flags.check or ()),
        keeps_billing=flags.keep_billing_header,
        keeps_answers=flags.keep_answers,
        image_hosts=tuple(name.strip() for name in flags.image_hosts.split(",")) if flags.image_hosts else (),
    )


def _checks(checks: Sequence[str]) -> dict[str, list[str]]:
    """Return the command of each check by its name.

    Raises:
        RequestError: A check has no name or no command, or two have one name.
        OptionError: There is no such program.
    """
    from edgedec_apps.cli.choice import command_of

    commands = dict[str, list[str]]()
    for words in checks:
        name, equals, command = words.partition("=")
        if not name or not equals or name in commands:
            raise RequestError(
                f"--check is {words!r:.80}; write NAME=COMMAND, each name once, such as tests=./run-tests"
            )
        commands[name] = command_of(command, "check")
    return commands


def _on_demand(load: LoadFlags) -> LoadFlags:
    """Return the options of models that are loaded on demand, without those that are for one model.

    A context that slides, rules of denoising and options of all drafts stay.
    """
    methods = [text for text in load.method or () if text.partition(":")[0] in ("slide", "diffusion")]
    drafts = [text for text in load.draft_option or () if text.partition("=")[0] in ("max", "tree", "numerics")]
    return replace(load, method=methods, draft_option=drafts, lora=None, chat_template=None, offline=True)


def _opener(settings: "Settings", load: LoadFlags, flags: ServeFlags) -> "Opener":
    """Return what loads the models (EdgedecError where an option is out of range)."""
    from edgedec_apps.cli.opening import engine_options, serves_grammars
    from edgedec_apps.server.registry.names import Names
    from edgedec_apps.server.registry.opener import Opener

    if flags.verbose:
        show_log()

    @contextmanager
    def showing() -> Iterator[OnProgress]:
        with (
            warnings_of("edgedec.tiles", "edgedec.api.load") as warnings,
            ProgressLine(quiet=flags.quiet) as on_progress,
        ):
            yield on_progress
        if not flags.quiet and not flags.verbose:
            for warning in warnings:
                say(f"edgedec: {warning}")

    warned = set[str]()

    def tell(sentence: str) -> None:
        if not flags.quiet and sentence not in warned:
            warned.add(sentence)  # a model that is loaded again has no news
            say(f"edgedec: {sentence}")

    options_of = partial(
        engine_options,
        n_parallel=settings.n_parallel,
        n_texts=flags.texts,
        grammars=serves_grammars(),
        keeps_prompts=True,
    )
    return Opener(
        listed=[entry.recipe.model for entry in Names(settings).served],
        options=options_of(load),
        others=options_of(_on_demand(load)),
        request_bytes=settings.room_bytes,
        showing=showing,
        tell=tell,
    )
