"""edgedec plan: the memory that a model would hold, what is given up to fit, and what else would fit."""

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgedec.api.load import asked_plan
from edgedec.api.options import EngineOptions
from edgedec.api.plan import find_model
from edgedec.drafter_traits import demands_of
from edgedec.errors import MemoryCapError, RequestError, counted
from edgedec.gguf.file import read_gguf
from edgedec.gguf.model_info import context_note, describe
from edgedec.load_options import ResolveOptions
from edgedec.load_plan import LoadPlan
from edgedec.memory.planner import plans_within
from edgedec.memory.setting import Cap
from edgedec.memory.system import available_bytes
from edgedec.memory_plan import format_bytes, parse_size
from edgedec.pictures import PictureReader
from edgedec.progress import CancelToken, stage
from edgedec_apps.base_memory import LEFT_BYTES, base_bytes
from edgedec_apps.cli.draft_options import Drafting, drafting_of
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.method_keys import model_keys
from edgedec_apps.cli.methods import asked_methods
from edgedec_apps.cli.opening import application_of, engine_options, room_bytes_of, serves_grammars
from edgedec_apps.cli.options import LoadFlags
from edgedec_apps.cli.pictures import picture_parts, pictures_document, pictures_lines
from edgedec_apps.cli.reports.machines import RuntimeThere, machine_of
from edgedec_apps.cli.reports.memory_report import plan_document, planned_range
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line, say, write_facts, write_json, write_line, write_table
from edgedec_apps.plots import COLORS, label, picture, require_picture
from edgedec_models.fetching.offline import NeedsDownloadError
from edgedec_models.stand_in import model_or_stand_in

_ANY_PEAK = 1 << 62  # what this process held says nothing of another machine
_COLUMNS = ("context", "rows", "drafting", "weights")  # changes with a column, as are those of a drafter


@dataclass(frozen=True, slots=True)
class PlannedUse:
    """The use that a model's memory is planned for.

    Attributes:
        flags: How the model is loaded.
        n_parallel: Requests at the same time, as of `edgedec serve`; None for the one prompt of `edgedec run`.
        machine: Name of the machine that is planned for; None for this one.
        n_texts: Texts of one prompt that a request writes at the same time.
        images: Pictures whose tokens are to be told.
    """

    flags: LoadFlags
    n_parallel: int | None = None
    machine: str | None = None
    n_texts: int = 1
    images: tuple[Path, ...] = ()


def print_plan(model: str, use: PlannedUse, *, plot: Path | None, as_json: bool, quiet: bool) -> None:
    """Print the memory plan of a model, and what else would fit; draw it into the file `plot`, where one is given.

    Raises:
        RequestError: The number of requests is out of range, or the picture's file has the wrong ending.
        RuntimeUnavailableError: A picture is to be drawn, and matplotlib is not installed.
        MemoryCapError: Even the smallest setting is over the cap; its plan is printed anyway.
        EdgedecError: As edgedec.load.
    """
    if use.n_parallel is not None and use.n_parallel < 1:
        raise RequestError(f"--parallel is {use.n_parallel}; it must be at least 1")
    require_picture(plot)
    cap = _cap(use)
    with stand_ins(model, use.flags, quiet=quiet or as_json) as (file, flags, note):
        here = replace(use, flags=flags)
        chosen, plans, pictures = interruptible(lambda cancel: _plans(file, here, cap, cancel, quiet=quiet or as_json))
        document = _document(model, here, chosen, plans)
    document["notes"] += [note] * bool(note)
    document |= {"pictures": pictures} if pictures else {}
    if as_json:
        write_json(document)
    else:
        _write(document, chosen, plans)
    if plot is not None:
        write_plot(plot, document)
    if not chosen.memory.fits:
        raise MemoryCapError(f"the model needs {chosen.memory.shortage}")


def _cap(use: PlannedUse) -> Cap:
    """Return the cap of the plan, with what this process holds, or what is assumed for the machine that is named."""
    memory, gpu_memory = use.flags.memory, use.flags.gpu_memory
    n_bytes = None if memory is None else parse_size(memory, "memory")
    gpu_bytes = None if gpu_memory is None else parse_size(gpu_memory, "gpu_memory")
    left = 0 if use.n_parallel is None else LEFT_BYTES  # of a server
    if use.machine is None:  # measured before the model's file is looked at
        return Cap(n_bytes, base_bytes() + left, whole_process=True, gpu_bytes=gpu_bytes)
    machine = machine_of(use.machine)
    most = n_bytes if n_bytes is not None and n_bytes <= machine.free_bytes else machine.free_bytes
    name = "allowed" if most == n_bytes else "free"
    base = machine.base_bytes + left
    cap = Cap(most, base, whole_process=True, name=name, beside="assumed", gpu_bytes=gpu_bytes)
    return replace(cap, earlier_peak_bytes=_ANY_PEAK)


def _plans(
    model: str, use: PlannedUse, cap: Cap, cancel: CancelToken, *, quiet: bool
) -> tuple[LoadPlan, list[LoadPlan], list[dict[str, Any]]]:
    """Return the plan that load takes, all plans by what they hold, the largest first, and what pictures become."""
    flags, n_parallel = use.flags, use.n_parallel
    room = available_bytes()  # planning may take more than the cap, so that it is known what would fit
    served = n_parallel is not None
    request_bytes = room_bytes_of(flags) if served and flags.memory is not None else 0
    application = application_of(flags, cap.beside_bytes, one_request=not served, request_bytes=request_bytes)
    with ProgressLine(quiet=quiet) as on_progress:
        grammars = served and serves_grammars()
        how: dict[str, Any] = {"n_parallel": n_parallel or 1, "n_texts": use.n_texts, "keeps_prompts": True}
        options = engine_options(flags, on_progress, cancel, grammars=grammars, **how)
        wishes = asked_plan(_runtime_of(model, options, room, use.machine), options, application, room)
        with stage(on_progress, "planning the memory"):
            chosen, plans = plans_within(wishes, cap)
        plans.sort(key=lambda plan: -plan.memory.total_bytes)
        return chosen, plans, _pictures(wishes.pictures, use.images)


def _pictures(reader: PictureReader | None, images: Sequence[Path]) -> list[dict[str, Any]]:
    """Return name, size and tokens of pictures (RequestError where the model reads none, or not these)."""
    if reader is None:
        if images:
            raise RequestError(
                "the model reads no pictures: no mmproj*.gguf lies beside it; name it by --method pictures:FILE"
            )
        return []
    try:
        return pictures_document(reader.mark, [{"role": "user", "content": picture_parts(images)}]) if images else []
    finally:
        reader.close()


def _runtime_of(model: str, options: EngineOptions, room: int | None, machine: str | None) -> LoadPlan:
    """Return the model's file and its runtime; on another machine, the runtime that puts layers on its GPUs."""
    if machine is None:
        return find_model(model, options, room, measure=False)
    there = machine_of(machine)
    if there.devices and options.runtime == "auto":
        options = replace(options, runtime="llamacpp")
    chosen = find_model(model, replace(options, n_gpu_layers=None, gpu_memory=None, device=None), room, measure=False)
    return replace(chosen, runtime=RuntimeThere(chosen.runtime, there), slower=None, reason=f"as on {machine}")


def _document(model: str, use: PlannedUse, chosen: LoadPlan, plans: list[LoadPlan]) -> dict[str, Any]:
    there = None if use.machine is None else machine_of(use.machine)
    step = _step(chosen.memory.slowdown)
    return (
        {"model": model, "free_bytes": available_bytes() if there is None else there.free_bytes}
        | plan_document(chosen.memory)
        | {
            "setting": _setting(chosen),
            "notes": _notes(chosen),
            "alternatives": [
                {
                    "given_up": list(other.memory.given_up),
                    "total_bytes": other.memory.total_bytes,
                    "fits": other.memory.fits,
                    "chosen": other is chosen,
                    "context": other.options.n_ctx,
                    "drafting": _drafting(other),
                    "step": _step(other.memory.slowdown),
                }
                for other in plans
            ],
            "speed": there.speed(model)
            if there
            else step and f"a step takes {step} as long as with all weights in memory",
        }
    )


def _notes(chosen: LoadPlan) -> list[str]:
    """Return the notes on a context that is longer than trained, and on a draft model that may not be loaded."""
    notes = [context_note(chosen.path, chosen.options.n_ctx or 0)]
    if chosen.draft_model is not None and not chosen.pinned:
        name = chosen.draft_model.name
        notes.append(f"the draft model {name} is loaded only where it can pay by the measured cost of forwards")
    return [note for note in notes if note]


def _setting(chosen: LoadPlan) -> dict[str, Any]:
    options = chosen.options
    return {
        "runtime": chosen.runtime.name,
        "runtime_reason": chosen.reason,
        "context": options.n_ctx,
        "kv_type": options.kv_type,
        "drafters": list(chosen.drafters),
        "draft_model": None if chosen.draft_model is None else str(chosen.draft_model),
        "small_model": None if chosen.companion_path is None else str(chosen.companion_path),
        "store_bytes": chosen.store_bytes,
        "max_rows": options.max_rows,
        "runtime_options": dict(options.runtime_options),
        "n_layers": None if options.layer_split is None else describe(read_gguf(chosen.path)).n_layer + 1,
        "layers": None if options.layer_split is None else dict(options.layer_split),
        "resident_bytes": options.resident_bytes,
    }


def _layers(by_device: dict[str, int], n_layers: int) -> str:
    """Return how many layers are where, for a person; the output matrix counts as a layer."""
    n_host = n_layers - sum(by_device.values())
    where = [f"{n} on {name}" for name, n in by_device.items()] + ([f"{n_host} on the host"] if n_host else [])
    return f"{', '.join(where)} (the output counts as one)"


def _write(document: dict[str, Any], chosen: LoadPlan, plans: list[LoadPlan]) -> None:
    write_line(one_line(document["model"]))
    write_line(chosen.memory.table())
    setting = document["setting"]
    why = f"; {setting['runtime_reason']}" if setting["runtime_reason"] else ""
    write_line("")
    write_facts(
        [
            ("runtime", setting["runtime"] + why),
            *([("layers", _layers(setting["layers"], setting["n_layers"]))] if setting["layers"] is not None else []),
            ("context", f"{counted(setting['context'], 'token')}, KV cache as {setting['kv_type']}"),
            ("drafting", _drafting(chosen)),
            *([("speed", document["speed"])] if document["speed"] else []),
            ("memory", planned_range(chosen.memory)),
            ("changed to fit", ", ".join(document["given_up"]) or "nothing"),
            *(("picture", line.removeprefix("picture ")) for line in pictures_lines(document.get("pictures", []))),
            *(("note", note) for note in document["notes"]),
            ("free memory", "unknown" if document["free_bytes"] is None else format_bytes(document["free_bytes"])),
        ]
    )
    if chosen.memory.partial:
        write_line("\nFinding out what else is needed takes more memory than is free; close programs and ask again.")
    elif len(plans) > 1:
        _write_states(document["alternatives"], plans)


def _write_states(states: Sequence[dict[str, Any]], plans: Sequence[LoadPlan]) -> None:
    """Write a line for each setting: what it holds and what it costs, whatever stands on the other lines."""
    write_line("\nWhat else could be held, a line for each; an arrow is at what is taken:")
    rows = [("", "memory", "", "context", "step", "drafts", "also changed")]
    drafters = {demands_of(factory).called for each in plans for factory in each.drafters.values()}
    for state, each in zip(states, plans, strict=True):
        verdict = "" if each.memory.cap_bytes is None else "fits" if state["fits"] else "too much"
        others = [phrase for kind, phrase in each.given_up.items() if kind not in _COLUMNS and kind not in drafters]
        size, mark = format_bytes(state["total_bytes"]), "->" if state["chosen"] else ""
        context, drafts = f"{state['context']:>7}", state["drafting"].replace(", at most", ", up to")
        rows.append((mark, f"{size:>9}", verdict, context, state["step"], drafts, ", ".join(others)))
    write_table(rows)


def _drafting(plan: LoadPlan) -> str:
    """Return what drafts, and how many tokens at the most."""
    n_most = plan.options.max_rows - 1
    return f"{' + '.join(plan.drafters)}, at most {counted(n_most, 'token')}" if plan.drafters else "off"


def _step(slowdown: float) -> str:
    """Return how much longer a step takes than with all weights in memory; "" where they are in memory.

    >>> _step(1.0), _step(1.074), _step(math.inf)
    ('', '1.07 times', 'an unknown number of times')
    """
    if not math.isfinite(slowdown):
        return "an unknown number of times"
    return "" if slowdown == 1 else f"{slowdown:.2f} times"


_MB = 1e6
_MOST_TIMES = 3  # a cap of more times the total would make all bars small
_BAR_INCHES, _HEAD_INCHES, _WIDTH_INCHES = 0.32, 1.6, 9.0


def write_plot(path: Path, document: Mapping[str, Any]) -> None:
    """Draw the JSON object of `edgedec plan`: megabytes (10^6 bytes) by term, from zero.

    Terms that grow with a text are hatched, as they are held only with a full context.

    Raises:
        StorageError: The file can't be written; an earlier file is unchanged.
    """
    terms, total, cap = document["terms"], document["total_bytes"] / _MB, document["cap_bytes"]
    inches = (_WIDTH_INCHES, _HEAD_INCHES + _BAR_INCHES * (len(terms) + 1))
    with picture(path, inches, f"{document['model']} · {document['setting']['context']} tokens of context") as figure:
        axes = figure.subplots()
        before = 0.0
        for row, term in enumerate(terms):
            width = term["n_bytes"] / _MB
            hatch = "///" if term["grows"] else None
            bar = axes.barh(row, width, left=before, color=COLORS[0], hatch=hatch, edgecolor="white", linewidth=0)
            bar[0].set_gid(f"term-{row}")
            before += width
            axes.annotate(format_bytes(term["n_bytes"]), (before, row), (4, 0), textcoords="offset points", va="center")
        bar = axes.barh(len(terms), total, color=COLORS[1])
        bar[0].set_gid("total")
        size = format_bytes(document["total_bytes"]) + (" and more" if document["partial"] else "")
        axes.annotate(size, (total, len(terms)), (4, 0), textcoords="offset points", va="center")
        shown = None if cap is None else min(cap / _MB, _MOST_TIMES * total)
        if shown is not None:
            cap_label = f"{document['cap_name']}: {format_bytes(cap)}"
            if shown == cap / _MB:
                axes.axvline(shown, color=COLORS[5], linestyle="--").set_gid("cap")
            else:
                cap_label += ", beyond the axis →"
            axes.annotate(cap_label, (shown, -0.6), (-3, 2), textcoords="offset points", ha="right", color=COLORS[5])
        names = [term["name"] + (" (grows)" if term["grows"] else "") for term in terms]
        axes.set_yticks(range(len(terms) + 1), [label(name) for name in [*names, "total"]])
        axes.set_ylim(len(terms) + 0.6, -1.1)
        axes.set_xlim(0, 1.15 * max(total, shown or 0.0))
        axes.set_xlabel("MB; hatched: held only as texts fill it")
        axes.grid(visible=True, axis="x", alpha=0.3)
        axes.set_axisbelow(True)


_NOTE = "planned by the header alone: a draft head, which is found by a model's weights, is not counted"


@contextmanager
def stand_ins(model: str, flags: LoadFlags, *, quiet: bool) -> Iterator[tuple[str, LoadFlags, str]]:
    """Yield a model's name, the flags and a note; a stand-in is in place of each model that is not on this machine.

    Where a header can't be had by itself, a person at a terminal is asked whether the model may be downloaded.

    Raises:
        NeedsDownloadError: The person refuses the download, or no person can be asked.
        EdgedecError: As model_or_stand_in.
    """
    with tempfile.TemporaryDirectory(prefix="edgedec-") as root:
        here = _stand_in(model, flags, Path(root, "model"), quiet=quiet)
        drafts, methods = list(flags.draft_option or ()), list(flags.method or ())
        if (draft := drafting_of(drafts).model) is not None:
            drafts.append(f"model={_stand_in(str(draft), flags, Path(root, 'draft'), quiet=quiet)}")
        for method, values in asked_methods(methods, "load").items():
            for key in model_keys(method.keys or Drafting):
                if (other := values.get(key)) is not None:
                    path = _stand_in(str(other), flags, Path(root, method.name), quiet=quiet)
                    methods.append(f'{method.name}:{key}="{path}"')
        note = _NOTE if Path(here).is_relative_to(root) else ""
        changed = replace(flags, draft_option=drafts, method=methods)
        yield here, changed, note


def _stand_in(model: str, flags: LoadFlags, folder: Path, *, quiet: bool) -> str:
    folder.mkdir()

    def work(cancel: CancelToken) -> str:
        with ProgressLine(quiet=quiet) as on_progress:
            options = ResolveOptions(offline=flags.offline, on_progress=on_progress, cancel=cancel)
            return str(model_or_stand_in(model, options, folder))

    try:
        return interruptible(work)
    except NeedsDownloadError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty() and _agrees(error)):
            raise
        return model


def _agrees(error: NeedsDownloadError) -> bool:
    """Ask a person at the terminal whether a model may be downloaded, and return the answer."""
    say(f"edgedec: {error}")
    sys.stderr.write("Download it now? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
