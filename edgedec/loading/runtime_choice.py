"""Which runtime runs a model: the one named, the first that takes it, or of two that do the faster, as measured."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgedec import plugins
from edgedec.errors import EdgedecError, RequestError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.formats import is_onnx
from edgedec.loading.runtime_comparison import as_measured, compare, is_faster
from edgedec.model import LoadOptions, Runtime
from edgedec.progress import stage
from edgedec.storage import probe_cache
from edgedec.storage.probe_cache import machine_key

_PREFERRED = ("cpu", "llamacpp")
_FOR_ONNX = ("onnx", "npu")
_NEVER_CHOSEN = ("reference",)
_KIND = "runtimes"
_TRIES, _MOST_TRIES = "tries", 3
_NO_GPUS = ("CPU", "BLAS")
_COMPARING = "comparing the runtimes' speed:"


@dataclass(frozen=True, slots=True)
class Choice:
    """The runtime chosen for a model file.

    Attributes:
        path: The model file.
        runtime: The runtime.
        refusals: Why other runtimes don't take it, by name.
        reason: What a comparison of two runtimes found, for a person; empty where there was none.
        declined: What runtimes that take the file, and were asked first, have against the options.
        slower: The runtime that was preferred but for its speed; it may need less memory.
    """

    path: Path
    runtime: Runtime
    refusals: dict[str, str]
    reason: str = ""
    declined: tuple[str, ...] = ()
    slower: Runtime | None = None


def choose_runtime(path: Path, name: str, options: LoadOptions | None = None, *, measure: bool = False) -> Choice:
    """Return the runtime of that name, or for "auto" the best that takes the file (and these options).

    Where the first two both take it, the one that is measured to be faster is chosen, drafts counted as they are
    expected on any text: whatever drafts, and how long a draft may be, changes nothing. The comparison takes 8 s at
    most, is made only if `measure`, and is remembered per model and machine in the options' cache_dir.

    Raises:
        PluginError: No runtime has that name, or it does not import.
        UnsupportedModelError, ModelFormatError: The file can't be run.
        RequestError: A runtime takes the file, but not the options, and no other one does; or the options ask for
            layers on a GPU, and there is none.
        CancelledError: The options' cancel came during the comparison.
    """
    wants_gpu = options is not None and bool(options.n_gpu_layers)
    if name != "auto":
        named = _made(plugins.load_plugin(plugins.RUNTIMES, name))
        note = _gpu_note(options, {name: _devices(named)}) if options is not None and wants_gpu else ""
        return Choice(path, named, {}, note)
    found = plugins.plugins(plugins.RUNTIMES)
    order = _order(path, found)
    if options is None or not wants_gpu:
        return _first_taking(path, found, order, options, measure=measure)
    devices = {candidate: _devices_of(found[candidate]) for candidate in order}
    note = _gpu_note(options, devices)
    with_gpu = [candidate for candidate in order if _may_have_gpu(devices[candidate])]
    choice = _first_taking(path, found, with_gpu or order, options, measure=measure)
    return replace(choice, reason="; ".join(filter(None, (choice.reason, note))))


def _first_taking(
    path: Path,
    found: Mapping[str, plugins.Plugin],
    order: Sequence[str],
    options: LoadOptions | None,
    *,
    measure: bool,
) -> Choice:
    """Return the first of these runtimes that takes the file and the options, or the second where it is faster."""
    refusals: dict[str, str] = {}
    declined: list[str] = []
    for candidate in order:
        checked = None if candidate == order[-1] else options  # the last hope says itself what it has against them
        runtime = _taking(found[candidate], path, checked, refusals, declined)
        if runtime is None:
            continue
        choice = Choice(path, runtime, refusals, declined=tuple(declined))
        if options is None or tuple(order[:2]) != _PREFERRED or candidate != _PREFERRED[0]:
            return choice
        return _compared(choice, found[order[1]], options, measure=measure)
    if declined:
        others = [f"; {name}: {reason}" for name, reason in refusals.items() if reason not in declined]
        raise RequestError(_together(declined) + "".join(others))
    if not is_onnx(path):
        read_gguf(path)  # a file that is no model at all is told as such, not as one that no runtime takes
    if len(refusals) == 1:
        raise UnsupportedModelError(*refusals.values())
    reasons = "; ".join(f"{runtime}: {reason}" for runtime, reason in refusals.items())
    raise UnsupportedModelError(f"no runtime takes {path}: {reasons}")


def _order(path: Path, names: Mapping[str, object]) -> list[str]:
    """Return whom to ask: our runtimes for GGUFs, or those for ONNX, the preferred first; then other packages'."""
    own = [name for name in _FOR_ONNX if name in names] if is_onnx(path) else [*_PREFERRED]
    return own + [name for name in names if name not in (*_PREFERRED, *_FOR_ONNX, *_NEVER_CHOSEN)]


def _devices_of(plugin: plugins.Plugin) -> tuple[str, ...] | None:
    """Return the devices of a runtime that may not be installed; None where it does not work."""
    try:
        return _devices(_made(plugin.load()))
    except EdgedecError:
        return None


def _devices(runtime: Runtime) -> tuple[str, ...] | None:
    try:
        return runtime.report().devices
    except EdgedecError:  # it will say so when it is asked for
        return None


def _may_have_gpu(devices: tuple[str, ...] | None) -> bool:
    """Tell whether a GPU is among a runtime's devices; one that works and names none may have one."""
    return devices is not None and (not devices or any(name.upper() not in _NO_GPUS for name in devices))


def _gpu_note(options: LoadOptions, devices: Mapping[str, tuple[str, ...] | None]) -> str:
    """Return what to tell of the layers on a GPU that were asked for; empty where there may be a GPU.

    -1 stands for all that can go there, so a machine without a GPU is only told. A number of layers is refused: to
    take the runtime that could have put them there would change the runtime for nothing.

    Raises:
        RequestError: A number of layers was asked for, and there is no GPU.
    """
    found = ", ".join(f"{name} has {' and '.join(names)}" for name, names in devices.items() if names)
    if not found or any(map(_may_have_gpu, devices.values())):
        return ""
    if (options.n_gpu_layers or 0) > 0:
        raise RequestError(
            f"n_gpu_layers is {options.n_gpu_layers}, and there is no GPU for them ({found}); leave device and "
            "n_gpu_layers out, or install a llama-cpp-python that is built for your GPU"
        )
    return f"no layer is on a GPU, as none was found ({found})"


@contextmanager
def told_with_others(choice: Choice) -> Iterator[None]:
    """Add to what the chosen runtime has against the options, in the block, what those asked before it take."""
    try:
        yield
    except RequestError as error:
        if choice.declined:
            raise RequestError(_together([*choice.declined, str(error)])) from error
        raise


def _together(refusals: Sequence[str]) -> str:
    """Return refusals of the same value as one, the last one where they are about different things.

    >>> _together(["kv_type is 'q9'; A takes f16", "kv_type is 'q9'; B takes f32"])
    "kv_type is 'q9'; A takes f16; B takes f32"
    """
    subjects, _, tails = zip(*(refusal.partition("; ") for refusal in refusals), strict=True)
    if len(set(subjects)) > 1:
        return refusals[-1]
    return "; ".join([subjects[0], *dict.fromkeys(filter(None, tails))])


def _taking(
    plugin: plugins.Plugin,
    path: Path,
    options: LoadOptions | None,
    refusals: dict[str, str],
    declined: list[str] | None = None,
) -> Runtime | None:
    """Return the runtime when it takes the file, and the options where there are any; else note why not."""
    try:
        runtime = _made(plugin.load())
        refusal = runtime.accepts(path)
        if refusal is None and options is not None:
            refusal = _declined(runtime, path, options)
            if refusal is not None and declined is not None:
                declined.append(refusal)
        if refusal is None:
            return runtime
    except EdgedecError as error:
        refusal = str(error)
    except Exception as error:  # one plug-in's fault must not end the search
        refusal = f"{type(error).__name__}: {error} (report it to {plugin.package})"
    refusals[plugin.name] = refusal
    return None


def _declined(runtime: Runtime, path: Path, options: LoadOptions) -> str | None:
    """Return what the runtime has against the options, when that is something."""
    try:
        runtime.plan(path, replace(options, on_progress=None))
    except RequestError as error:
        return str(error)
    return None


def _made(plugin: Any) -> Runtime:
    runtime: Runtime = plugin() if isinstance(plugin, type) else plugin
    return runtime


def _compared(choice: Choice, rival: plugins.Plugin, options: LoadOptions, *, measure: bool) -> Choice:
    """Return the choice, or the rival's where that is known, or found now, to be faster."""
    first = choice.runtime
    key = _key(choice.path, options)
    known = probe_cache.get(options.cache_dir, _KIND, key)
    found = known if isinstance(known, dict) and as_measured(known.get(first.name)) is not None else {}
    if not found or (measure and _unfinished(found, rival.name)):
        if not measure:
            return choice
        n_tries = _n_tries(found) + 1
        with stage(options.on_progress, _COMPARING, f"{first.name} with {rival.name}"):
            other = _taking(rival, choice.path, options, choice.refusals)
            if other is None:
                return choice
            measured = compare(choice.path, first, other, options)
        found = {name: one and one.as_dict() for name, one in measured.items()} | {_TRIES: n_tries}
        probe_cache.put(options.cache_dir, _KIND, key, found)
    ours, theirs = as_measured(found.get(first.name)), as_measured(found.get(rival.name))
    if ours is None:
        return choice
    if theirs is None:
        return replace(choice, reason=f"{ours.text(first.name)}; {rival.name} took too long to load")
    reason = f"{ours.text(first.name)}; {theirs.text(rival.name)}"
    if is_faster(theirs, ours):
        other = _taking(rival, choice.path, options, choice.refusals)
        if other is not None:
            return replace(choice, runtime=other, reason=reason, slower=first)
    return replace(choice, reason=reason)


def _unfinished(found: Mapping[str, Any], name: str) -> bool:
    """Tell whether a runtime was not measured, perhaps for a busy machine, and is worth another try."""
    return found.get(name) is None and _n_tries(found) < _MOST_TRIES


def _n_tries(found: Mapping[str, Any]) -> int:
    n = found.get(_TRIES)
    return n if isinstance(n, int) else 0


def _key(path: Path, options: LoadOptions) -> str:
    """Name model, machine and options of a comparison: what changes a forward's time, and not what changes drafts."""
    from edgedec import __version__

    forward = f"{options.kv_type} {options.flash_attention} {options.mmap} {options.repack}"
    return f"{__version__} {read_gguf(path).header_hash} {machine_key(options)} {forward}"
