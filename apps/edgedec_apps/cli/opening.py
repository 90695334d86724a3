"""From the options of a command to a loaded engine."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from edgedec.api.engine import Engine, save_draft_store
from edgedec.api.load import open_engine
from edgedec.api.options import Application, EngineOptions
from edgedec.api.requests import require_rule
from edgedec.drafter import STORE_BYTES
from edgedec.errors import EdgedecError, OptionError
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.memory.setting import Cap
from edgedec.memory_plan import parse_size
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import SamplingParams
from edgedec_apps.base_memory import base_bytes
from edgedec_apps.cli.draft_options import drafting_of
from edgedec_apps.cli.methods import asked_methods, lossy_of, require_stages, text_options, values_of
from edgedec_apps.cli.options import LoadFlags, OutputFlags
from edgedec_apps.cli.sampling_options import SamplingFlags, grammar_options
from edgedec_apps.cli.shown.log import show_log, warnings_of
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import say
from edgedec_apps.cli.wording import in_options
from edgedec_apps.fit_first import require_fit
from edgedec_apps.machine_speed import keep_speed
from edgedec_apps.texts import adapter, read_text

if TYPE_CHECKING:
    from edgedec_apps.documents.passages import Passage
    from edgedec_apps.documents.search import Rank
    from edgedec_models.presets import Preset

_RPC_WAIT_S = 120.0
ONE_REQUEST_BYTES = 4_000_000
"""Most bytes that each drafter keeps where there is one request only: the store holds that request's own text, too."""


def open_model(
    name: str,
    flags: LoadFlags,
    output: OutputFlags,
    cancel: CancelToken,
    *,
    one_request: bool = False,
    n_parallel: int = 1,
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
        n_parallel: Requests that are answered at the same time.
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
    with warnings_of("edgedec.tiles", "edgedec.api.load") as warnings, bar as show:
        options = engine_options(
            flags, show, cancel, n_parallel=n_parallel, n_texts=n_texts, grammars=grammars, keeps_prompts=keeps_prompts
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


def open_beside(name: str, flags: LoadFlags, output: OutputFlags, cancel: CancelToken) -> Engine:
    """Open a further model, that ranks or scores, by the flags that concern it (raises what open_model raises)."""
    flags = LoadFlags(memory=flags.memory, threads=flags.threads, offline=flags.offline, draft="off")
    return open_model(name, flags, OutputFlags(quiet=output.quiet), cancel, one_request=True)


def rank_by_model(name: str | None, load: LoadFlags, output: OutputFlags) -> "Rank":
    """Return what ranks passages: by the vectors of the named embedding model, else by words."""
    from edgedec_apps.documents.passages import by_words

    if name is None:
        return by_words

    def rank(
        passages: Sequence["Passage"], question: str, cancel: CancelToken | None, on_progress: OnProgress | None
    ) -> list[int]:
        from edgedec_apps.documents.search import by_meaning

        stop = cancel or CancelToken()
        with open_beside(name, load, output, stop) as embedder:
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
    require_stages(flags.method, "load")
    methods, drafting = values_of(asked_methods(flags.method, "load")), drafting_of(flags.draft_option)
    pictures = methods.get("pictures", {})
    projector, cache = pictures.get("projector", "auto"), flags.prompt_cache or ("auto" if keeps_prompts else "off")
    return EngineOptions(
        runtime=flags.runtime,
        n_ctx=flags.context,
        lossy=lossy_of(methods),
        memory=flags.memory,
        gpu_memory=flags.gpu_memory,
        draft=flags.draft,
        draft_model=drafting.model,
        draft_head=drafting.head,
        lora=tuple(map(adapter, flags.lora or [])),
        n_draft_max=drafting.max,
        drafting=drafting.options(drafts=flags.draft != "off"),
        chat_template=None if flags.chat_template is None else read_text(flags.chat_template),
        projector=None if projector == "off" else projector,
        image_max_tokens=pictures.get("max_tokens"),
        grammars=grammars,
        n_parallel=n_parallel,
        n_texts=n_texts,
        n_threads=flags.threads,
        kv_type=flags.kv_type,
        prompt_cache=None if cache == "off" else cache,
        n_gpu_layers=flags.n_gpu_layers,
        device=flags.device,
        runtime_options=_own_options(flags.runtime_option or []),
        offline=flags.offline,
        on_progress=on_progress,
        cancel=cancel,
    )


def _own_options(options: Sequence[str]) -> dict[str, object]:
    """Return the options of one runtime, from texts such as "mmap=no"; a text waits for lost machines for 120 s.

    Raises:
        OptionError: A text is not NAME=VALUE.
    """
    pairs = [text.partition("=") for text in options]
    for text, (name, sign, _) in zip(options, pairs, strict=True):
        if not name or not sign:
            raise OptionError("runtime_options", text, "write NAME=VALUE, such as mmap=no")
    by_name: dict[str, object] = {name.strip(): value for name, _, value in pairs}
    return {"rpc_wait": _RPC_WAIT_S, **by_name} if "rpc" in by_name else by_name


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
    keeps_none = one_request and drafting_of(flags.draft_option).store is None
    store_bytes = ONE_REQUEST_BYTES if keeps_none else STORE_BYTES
    return Application(base, store_bytes, request_bytes)


def room_bytes_of(flags: LoadFlags) -> int:
    """Return the bytes that a server keeps for all its requests together: at most a sixteenth of the cap."""
    from edgedec_apps.server.core.settings import ROOM_BYTES

    return ROOM_BYTES if flags.memory is None else min(ROOM_BYTES, parse_size(flags.memory, "memory") // 16)


def serves_grammars() -> bool:
    """Return whether requests to a server may ask for texts that keep to a grammar: where llguidance is installed."""
    return find_spec("llguidance") is not None


def text_options_of(
    model: str, load: LoadFlags, sampling: SamplingFlags, system: str | None
) -> tuple[dict[str, Any], str | None]:
    """Return the options of Engine.stream and the system message: those of the flags, then those of a preset.

    Raises:
        RequestError: An option is out of range.
        EdgedecError: As grammar_options, asked_methods, drafting_of and preset_of.
    """
    rule = drafting_of(load.draft_option).rule
    if rule is not None:
        require_rule(rule)
    texts = text_options(values_of(asked_methods(load.method, "text")))
    options = sampling.as_options() | texts
    if (preset := preset_of(model)) is not None:
        options = preset.sampling | options
        system = preset.system or None if system is None else system
    beside = ("json_close", "methods")
    SamplingParams(**{name: value for name, value in options.items() if name not in beside})
    return options | grammar_options(sampling, options) | ({} if rule is None else {"verify": rule}), system


def keep_learned(model: str, engine: Engine) -> None:
    """Save the draft store and the model's speed; the answer is out already, so a failure is only reported."""
    try:
        save_draft_store(engine)
    except EdgedecError as error:
        say(f"edgedec: {in_options(error)}")
    with suppress(EdgedecError):  # the file may be gone
        preset = preset_of(model)
        keep_speed(resolve(model if preset is None else preset.model, ResolveOptions(offline=True)), engine)


def preset_of(model: str) -> "Preset | None":
    """Return the preset of a name, or None where the name is a path or no preset's.

    Raises:
        ModelFormatError: The preset's file is damaged.
    """
    from edgedec_models.presets import find_preset

    return None if os.path.exists(model) else find_preset(model)


def loading(preset: "Preset", options: "EngineOptions") -> "EngineOptions":
    """Return the options of loading, with those of a preset where they are not given."""
    return replace(
        options,
        n_ctx=preset.n_ctx if options.n_ctx is None else options.n_ctx,
        chat_template=options.chat_template or preset.template or None,
        draft_head=options.draft_head or preset.draft_head or None,
        lora=options.lora or tuple(map(adapter, preset.lora.splitlines())),
    )
