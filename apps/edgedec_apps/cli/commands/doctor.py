"""edgedec doctor: what this machine has, and which parts of edgedec work on it."""

import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import edgedec
from edgedec import plugins
from edgedec.errors import EdgedecError, PluginError, RuntimeAbsentError
from edgedec.load_options import LoadOptions
from edgedec.memory import system as system_memory
from edgedec.memory_plan import devices_of, format_bytes
from edgedec.processor import cpu_facts
from edgedec_apps.clash import clash
from edgedec_apps.cli.declared import output_flag
from edgedec_apps.cli.options import AsJson
from edgedec_apps.cli.shown.progress import shown_at_a_terminal
from edgedec_apps.cli.shown.terminal import write_facts, write_json, write_line
from edgedec_models.folders import models_folder, own_folder
from edgedec_runtimes.shared.cpu_count import usable_cores

if TYPE_CHECKING:
    from edgedec.runtime import Runtime, RuntimeReport

T = TypeVar("T")
_PACKAGES = (
    "numpy onnxruntime onnxruntime-ep-webgpu onnxruntime-qnn onnx llama-cpp-python gguf llguidance "
    "starlette uvicorn huggingface_hub typer rich jinja2"
).split()
_FEATURES = (
    "sse4_2 avx avx2 fma f16c avx512f avx512_vnni avx512_bf16 avx_vnni amx_int8 asimd asimddp i8mm sve bf16"
).split()

_FAST = ("avx2", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
_BROKEN, _ABSENT, _NO_DEVICE, _HUGE_PAGES = "does not work: ", "optional, not here: ", "none", "huge pages"


def command(
    *,
    all_facts: bool = output_flag("--all", "Show every feature, device, plug-in and package.", False),
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, and which runtimes work; --all shows devices, plug-ins and versions, too.

    Another project whose files lie in edgedec's folder is named as well.
    """
    with shown_at_a_terminal("asking the runtimes"):
        document = _document()
    if as_json:
        write_json(document)
        return
    if not all_facts:
        write_facts(_summary(document))
        return
    write_facts([(name, value) for name, value in document.items() if isinstance(value, str)])
    for name, value in document.items():
        if isinstance(value, dict):
            write_line(f"\n{name}")
            write_facts(list(value.items()), indent="  ")


def _summary(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the document in at most ten lines: what works without a word more, and what does not with its name."""
    cpu, memory = document["cpu"], document["memory"]
    idle = [name for name, state in document["runtimes"].items() if state.startswith(_BROKEN)]
    failed = [name for name, state in document["plug-ins"].items() if not state.startswith("ok")]
    absent = [name for name, state in document["runtimes"].items() if state.startswith(_ABSENT)]
    broken = dict.fromkeys([*(f"runtime {name}" for name in idle), *failed])
    devices = [name for name in document["devices"] if name != _NO_DEVICE]
    return [
        ("edgedec", f"{document['edgedec']}, Python {platform.python_version()}, {platform.system()}"),
        *([("clash", document["clash"])] if "clash" in document else []),
        ("cpu", f"{cpu['model']}, {cpu['cores usable']} cores usable, {_best(cpu['features'].split())}"),
        ("memory", ", ".join(f"{name} {size}" for name, size in memory.items() if name != _HUGE_PAGES)),
        ("models", document["models"]["cache"]),
        ("runtimes", ", ".join(name for name in document["runtimes"] if name not in (*idle, *absent))),
        *([("optional", f"{', '.join(absent)} (not here; how to get them: edgedec doctor --all)")] if absent else []),
        *([("not working", ", ".join(broken))] if broken else []),
        ("devices", ", ".join(devices) or "the CPU"),
        ("more", "edgedec doctor --all: reasons, features, plug-ins, versions of packages"),
    ]


def _best(features: list[str]) -> str:
    """Return the features of a processor that matter most for speed.

    >>> _best(["avx", "avx2", "fma", "avx512f", "avx512_vnni"]), _best(["asimd"])
    ('avx2 avx512_vnni', 'asimd')
    """
    return " ".join(name for name in features if name in _FAST) or " ".join(features)


def _document() -> dict[str, Any]:
    intruder = clash()
    return {
        "edgedec": getattr(edgedec, "__version__", "of unknown version"),
        **({"clash": intruder} if intruder else {}),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "cpu": _cpu(),
        "memory": _memory(),
        "models": {"cache": str(models_folder()), "EDGEDEC_MODELS": str(own_folder() or "not set")},
        "runtimes": {name: _summarize(answer) for name, answer in ask_runtimes(lambda one: one.report()).items()},
        "devices": _devices(),
        "plug-ins": _plugins(),
        "packages": {name: plugins.installed_version(name) or "not installed" for name in _PACKAGES},
    }


def _cpu() -> dict[str, str]:
    model, features = cpu_facts()
    present = [feature for feature in _FEATURES if feature in features]
    return {"model": model, "cores usable": str(usable_cores()), "features": " ".join(present) or "unknown"}


def _memory() -> dict[str, str]:
    sizes = {
        "total": system_memory.total_bytes(),
        "available": system_memory.available_bytes(),
        "cgroup limit": system_memory.cgroup_limit_bytes(),
    }
    shown = {name: format_bytes(n_bytes) for name, n_bytes in sizes.items() if n_bytes is not None}
    return (shown or {"total": "unknown on this system"}) | {_HUGE_PAGES: _huge_pages()}


def _huge_pages() -> str:
    """Return which huge pages the system gives, in a sentence on what the option huge_pages can do with them."""
    from edgedec_runtimes.cpu.tiles.huge_pages import huge_pages

    pages = huge_pages()
    if pages is None:
        return "none"
    meanings = {"always": "for all private memory", "madvise": "for private memory where a program asks"}
    for_private = meanings.get(pages.private, "not for private memory (transparent_hugepage/enabled is never)")
    return f"{pages.n_bytes >> 10} KiB each, {for_private}"


def ask_runtimes(question: Callable[["Runtime"], T]) -> dict[str, T | EdgedecError]:
    """Return each runtime's answer, or the EdgedecError with which the runtime failed, by the runtime's name."""
    answers: dict[str, T | EdgedecError] = {}
    for name, plugin in plugins.plugins(plugins.RUNTIMES).items():
        try:
            loaded = plugin.load()
            answers[name] = question(loaded() if isinstance(loaded, type) else loaded)
        except EdgedecError as error:
            answers[name] = error
        except Exception as error:  # a plug-in's own
            answers[name] = PluginError(f"{type(error).__name__}: {error} (from {plugin.package})")
    return answers


def _summarize(answer: "RuntimeReport | EdgedecError") -> str:
    """Return a runtime's version, devices and notes, or why it does not work."""
    if isinstance(answer, EdgedecError):
        return f"{_ABSENT if isinstance(answer, RuntimeAbsentError) else _BROKEN}{answer}"
    devices = f"devices {', '.join(answer.devices)}" if answer.devices else ""
    return " · ".join(part for part in (answer.version, devices, *answer.notes) if part)


def _devices() -> dict[str, str]:
    """Return the devices that layers can be put on, by runtime and name, with their memory."""
    lines = {}
    for runtime, devices in ask_runtimes(lambda one: devices_of(one, LoadOptions())).items():
        for device in () if isinstance(devices, EdgedecError) else devices:
            kind = f"{device.description or device.backend} ({device.backend})"
            shared = ", shared with the host" if device.unified else ""
            sizes = f"{format_bytes(device.total_bytes)}{shared}, {format_bytes(device.free_bytes)} free"
            lines[f"{runtime} {device.name}"] = f"{kind}, {sizes}"
    return lines or {_NO_DEVICE: "layers run on the CPU"}


def _plugins() -> dict[str, str]:
    states: dict[str, str] = {}
    for kind in plugins.KINDS:
        for name, plugin in plugins.plugins(kind).items():
            try:
                plugin.load()
                state = f"ok ({plugin.package})"
            except EdgedecError as error:
                state = str(error)
            states[f"{plugins.word_for(kind)} {name}"] = state
    return states
