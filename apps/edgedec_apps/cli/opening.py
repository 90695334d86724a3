"""From the options of a command to a loaded engine."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from edgedec.api.engine import Engine
from edgedec.api.load import open_engine
from edgedec.api.options import Application, DraftOptions, EngineOptions, Lossy
from edgedec.api.requests import require_rule
from edgedec.drafter import STORE_BYTES
from edgedec.errors import EdgedecError, OptionError
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.memory.setting import Cap
from edgedec.memory_plan import parse_size
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sequence import COUPLED
from edgedec_apps.base_memory import base_bytes
from edgedec_apps.cli.options import LoadFlags, OutputFlags
from edgedec_apps.cli.preset_options import loading, preset_of
from edgedec_apps.cli.sampling_options import SamplingFlags
from edgedec_apps.cli.shown.log import show_log, warnings_of
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import say
from edgedec_apps.cli.wording import KEYWORDS, in_options
from edgedec_apps.fit_first import require_fit
from edgedec_apps.machine_speed import keep_speed
from edgedec_apps.texts import adapter, read_text

if TYPE_CHECKING:
    from edgedec_apps.documents.passages import Passage
    from edgedec_apps.documents.search import Rank

_RPC_WAIT_S = 120.0
_DRAFTING = {f"draft_{name}": name for name in ("overlap", "tree", "numerics", "store")}
_LOSSY = ("slide", "layer_skip", "layer_skip_force")
_METHODS = {
    "switching": {name: name for name in ("small_model", "entropy", "entropy_force")},
    "diffusion": {"denoise": "denoise"},
    "prompt_keep": {"prompt_keep": "keep", "prompt_keep_model": "model"},
}  # by its name, a method's options by those of the command line
ONE_REQUEST_BYTES = 4_000_000
"""Most bytes that each drafter keeps where there is one request only: the store holds that request's own text, too."""


def open_model(
    name: str,
    flags: LoadFlags,
    output: OutputFlags,
    cancel: CancelToken,
    *,
    one_request: bool = False,
    n_texts: int = 1,
    grammars: bool = False,
    keeps_prompts: bool = False,
) -> Engine:
    """Find a model, plan its memory and load it, with progress and warnings on standard error.

    Args:
        name: The name of the model, or of a preset; or a path.
        flags: How it is loaded.
        output: What is shown.
        cancel: Stops downloading and loading.
        one_request: Whether the engine will serve a single request, whose text the drafters need not keep for others.
        n_texts: Texts of one prompt that are written at the same time.
        grammars: Whether texts may keep to grammars, which takes memory.
        keeps_prompts: Whether prompts are kept on the disk unless the flags say otherwise.

    Raises:
        EdgedecError: As edgedec.load.
    """
    if output.verbose:
        show_log()
    base = None if flags.memory is None else base_bytes()  # before the model's file is looked at
    bar = ProgressLine(f"loading {name}", quiet=output.quiet)
    with warnings_of("edgedec.tiles", "edgedec.api.load") as warnings, bar as on_progress:
        options = engine_options(
            flags, on_progress, cancel, n_texts=n_texts, grammars=grammars, keeps_prompts=keeps_prompts
        )
        application = application_of(flags, base, one_request=one_request)
        if (preset := preset_of(name)) is not None:
            name, options = preset.model, loading(preset, options)
        if base is not None:
            cap = Cap(options.cap_bytes, base, whole_process=True, gpu_bytes=options.gpu_cap_bytes)
            require_fit(name, options, application, cap)
        engine = open_engine(name, options, application)
    if not output.quiet and not output.verbose:
        for warning in warnings:
            say(f"edgedec: {warning}")
    if engine.plan.given_up and not output.quiet:
        say(f"edgedec: to keep within {engine.plan.caps}: {', '.join(engine.plan.given_up)}")
    return engine


def rank_by_model(name: str | None, load: LoadFlags, output: OutputFlags) -> "Rank":
    """Return what ranks passages: by the vectors of the named embedding model, else by words."""
    from edgedec_apps.documents.passages import by_words

    if name is None:
        return by_words

    def rank(
        passages: Sequence["Passage"], question: str, cancel: CancelToken | None, on_progress: OnProgress | None
    ) -> list[int]:
        from edgedec_apps.documents.search import by_meaning

        flags = LoadFlags(memory=load.memory, threads=load.threads, offline=load.offline, draft="off")
        stop = cancel or CancelToken()
        with open_model(name, flags, OutputFlags(quiet=output.quiet), stop, one_request=True) as embedder:
            return by_meaning(embedder, passages, question, stop, on_progress)

    return rank


def engine_options(
    flags: LoadFlags,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
    *,
    n_parallel: int = 1,
    n_texts: int = 1,
    grammars: bool = False,
    keeps_prompts: bool = False,
) -> EngineOptions:
    """Return the options of edgedec.load that the flags give; the chat template's file is read.

    Raises:
        EdgedecError: An option is out of range, or the chat template can't be read.
    """
    given = {KEYWORDS.get(field.name, field.name): getattr(flags, field.name) for field in fields(flags)}
    for name in (*_DRAFTING, *_LOSSY, *(name for names in _METHODS.values() for name in names)):
        del given[name]
    methods = {
        method: {own: value for name, own in names.items() if (value := getattr(flags, name)) not in (None, False)}
        for method, names in _METHODS.items()
    }
    given["lossy"] = Lossy(
        **{name: getattr(flags, name) for name in _LOSSY},
        methods={method: options for method, options in methods.items() if options} or None,
    )
    drafting = {field: getattr(flags, name) for name, field in _DRAFTING.items()}
    given["drafting"] = DraftOptions(**drafting, max_rows=1 if flags.draft == "off" else None)
    size = flags.prompt_cache or ("auto" if keeps_prompts else "off")
    given["prompt_cache"] = None if size == "off" else size
    given["runtime_options"] = _own_options(flags.runtime_option or [])
    given["projector"] = None if flags.mmproj == "off" else flags.mmproj
    given["chat_template"] = None if flags.chat_template is None else read_text(flags.chat_template)
    given |= {"n_parallel": n_parallel, "n_texts": n_texts, "lora": tuple(map(adapter, flags.lora or []))}
    return EngineOptions(**given, grammars=grammars, on_progress=on_progress, cancel=cancel)


def _own_options(given: Sequence[str]) -> dict[str, object]:
    """Return the options of one runtime, from texts such as "mmap=no"; a text waits for lost machines for 120 s.

    Raises:
        OptionError: A text is not NAME=VALUE.
    """
    pairs = [text.partition("=") for text in given]
    for text, (name, sign, _) in zip(given, pairs, strict=True):
        if not name or not sign:
            raise OptionError("runtime_options", text, "write NAME=VALUE, such as mmap=no")
    own: dict[str, object] = {name.strip(): value for name, _, value in pairs}
    return {"rpc_wait": _RPC_WAIT_S, **own} if "rpc" in own else own


def application_of(
    flags: LoadFlags, base: int | None, *, one_request: bool = False, request_bytes: int = 0
) -> Application:
    """Return what the memory plan must know of a command.

    Args:
        flags: How the model is loaded.
        base: Bytes that the process holds without a model; None where no cap is given.
        one_request: Whether the engine will serve a single request.
        request_bytes: Bytes that a server keeps for requests.
    """
    store_bytes = ONE_REQUEST_BYTES if one_request and flags.draft_store is None else STORE_BYTES
    return Application(base, store_bytes, request_bytes)


def room_bytes_of(flags: LoadFlags) -> int:
    """Return the bytes that a server keeps for all its requests together: at most a sixteenth of the cap."""
    from edgedec_apps.server.core.settings import ROOM_BYTES

    return ROOM_BYTES if flags.memory is None else min(ROOM_BYTES, parse_size(flags.memory, "memory") // 16)


def serves_grammars() -> bool:
    """Return whether requests to a server may ask for texts that keep to a grammar: where llguidance is installed."""
    return find_spec("llguidance") is not None


def sampling_options(flags: SamplingFlags) -> dict[str, Any]:
    """Return the options of Engine.stream that the flags give (RequestError where one is out of range)."""
    options = flags.as_options()
    SamplingParams(**{name: value for name, value in options.items() if name != "verify"})
    require_rule(options.get("verify", COUPLED))
    return options


def keep_learned(model: str, engine: Engine) -> None:
    """Save the draft store and the model's speed; the answer is out already, so a failure is only reported."""
    try:
        engine.save_draft_store()
    except EdgedecError as error:
        say(f"edgedec: {in_options(error)}")
    with suppress(EdgedecError):  # the file may be gone
        preset = preset_of(model)
        keep_speed(resolve(model if preset is None else preset.model, ResolveOptions(offline=True)), engine)
