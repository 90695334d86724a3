"""Which runtime runs a model: the one named, or the first that takes the model, or the faster of two, as measured."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

from edgedec import plugins
from edgedec.errors import EdgedecError, ModelFormatError, PluginError, RequestError, UnsupportedModelError, argument
from edgedec.gguf.file import is_onnx, read_gguf, read_header_of
from edgedec.gguf.model_kinds import denoises, is_embedder
from edgedec.load_options import LoadOptions, OtherMachines, own_options, read_options
from edgedec.load_plan import LoadPlan
from edgedec.loading.comparison import Comparison, compared_runtimes
from edgedec.progress import stage
from edgedec.runtime import HasKernels, Runtime
from edgedec.storage import probe_cache
from edgedec.storage.probe_cache import machine_key

_PREFERRED = ("cpu", "llamacpp")
_FOR_ONNX = ("onnx", "npu")
_NEVER_CHOSEN = ("reference",)
_KIND = "runtimes"
_NO_GPUS = ("CPU", "BLAS")
_COMPARING = "comparing the runtimes' speed:"


def choose_runtime(path: Path, name: str, options: LoadOptions | None = None, *, measure: bool = False) -> LoadPlan:
    """Return a file with the runtime of that name, or for "auto" with the best one that takes it and the options.

    Where both preferred runtimes take a model that writes, the one that was measured to be faster is chosen, with
    drafts counted as they are expected on any text: neither the drafters nor the length of drafts can change the
    choice. The comparison takes at most 8 s, is made only if `measure`, and is remembered by machine below the options'
    cache_dir. Nothing is measured where the answer is known, where the model's GGUF would have to be made again for
    it, and nothing is remembered that was measured while other programs took the processor.

    Raises:
        PluginError: No runtime has that name, or the runtime does not import.
        UnsupportedModelError, ModelFormatError: No runtime can run the file.
        RequestError: Runtimes take the file, but none of them takes the options; or the options ask for a number of
            layers on a GPU, and there is no GPU.
        CancelledError: The options' `cancel` was cancelled during the comparison.
    """
    header = None
    with suppress(EdgedecError):  # a runtime of another package may take what is no GGUF
        header = read_header_of(path)
    wants_gpu = options is not None and bool(options.n_gpu_layers) and not options.machines
    if name != "auto":
        runtime = _instance(plugins.load_plugin(plugins.RUNTIMES, name))
        if options is not None:
            read_options(own_options(runtime), options.runtime_options, f"the {name} runtime")
        note = _gpu_note(options, {name: _devices(runtime)}) if options is not None and wants_gpu else ""
        return LoadPlan(path, runtime, note, header=header)
    installed = plugins.plugins(plugins.RUNTIMES)
    order = _order(path, installed)
    note = ""
    if options is not None and wants_gpu:
        devices = {candidate: _devices_of(installed[candidate]) for candidate in order}
        note = _gpu_note(options, devices)
        order = [candidate for candidate in order if _may_have_gpu(devices[candidate])] or order
    choice = replace(_first_taking(path, installed, order, options), header=header)
    may_differ = tuple(order[:2]) == _PREFERRED and choice.runtime.name == _PREFERRED[0]
    is_other = header is not None and (is_embedder(header) or denoises(header))
    measure = measure and (header is None or header.form is None)  # the rival may need the GGUF
    if options is not None and may_differ and not is_other:
        for rival in order[1:] if options.device == "auto" else order[1:2]:
            choice = _compare(choice, installed[rival], options, measure=measure)
    return replace(choice, reason="; ".join(filter(None, (choice.reason, note))))


def other_machines(name: str, options: Mapping[str, object]) -> OtherMachines | None:
    """Return a runtime's own options by which other machines take layers, before a runtime is chosen; None without.

    Args:
        name: Name of a runtime, or "auto".
        options: The own options that the user gave.

    Raises:
        RequestError: An option is unknown or out of range.
    """
    for plugin in plugins.plugins(plugins.RUNTIMES).values() if options else ():
        if name in ("auto", plugin.name):
            with suppress(EdgedecError):  # a runtime that does not import takes no model
                runtime = _instance(plugin.load(), plugin.package)
                if not options.keys().isdisjoint(getattr(own_options(runtime), "of_other_machines", ())):
                    break
    else:
        return None
    return machines_of(runtime, options)


def machines_of(runtime: Runtime, options: Mapping[str, object]) -> OtherMachines | None:
    """Return a runtime's own options where other machines take layers by them (raises as read_options), else None."""
    runtime_options = read_options(own_options(runtime), options, f"the {runtime.name} runtime")
    return runtime_options if isinstance(runtime_options, OtherMachines) and runtime_options.machines else None


def _first_taking(
    path: Path, runtimes: Mapping[str, plugins.Plugin], order: Sequence[str], options: LoadOptions | None
) -> LoadPlan:
    """Return the first of the runtimes in `order` that takes the file and the options (raises as choose_runtime)."""
    refusals: dict[str, EdgedecError] = {}
    for candidate in order:
        # Whether the last runtime takes the options is found out only where earlier refusals may say more than its own:
        # where options were refused, or where the last is not one of the usual two; else planning says so.
        is_refused = any(isinstance(error, RequestError) for error in refusals.values())
        is_asked = candidate != order[-1] or is_refused or (bool(refusals) and candidate not in _PREFERRED)
        runtime = _taking(runtimes[candidate], path, options if is_asked else None, refusals)
        if runtime is not None:
            return LoadPlan(path, runtime)
    for candidate, refusal in refusals.items():
        _require_sound(runtimes[candidate], path, options, str(refusal))
    declined = {name: error.marked for name, error in refusals.items() if isinstance(error, RequestError)}
    if declined:
        first = next(iter(declined))
        others = [f"; {name}: {e.marked}" for name, e in refusals.items() if e.marked != declined[first]]
        raise RequestError(declined[first] + "".join(others))
    if not is_onnx(path):
        read_gguf(path)  # where the file is no model at all, this raises what it is instead
    if len(refusals) == 1:
        raise UnsupportedModelError(next(iter(refusals.values())).marked)
    reasons = "; ".join(f"{name}: {error.marked}" for name, error in refusals.items())
    raise UnsupportedModelError(f"no runtime takes {path}: {reasons}")


def _require_sound(plugin: plugins.Plugin, path: Path, options: LoadOptions | None, refusal: str) -> None:
    """Raise ModelFormatError where a runtime refused a file as damaged, which accepts() only says in words.

    Then that is what is wrong, whatever other runtimes lack.
    """
    try:
        _instance(plugin.load(), plugin.package).plan(path, replace(options or LoadOptions(), on_progress=None))
    except ModelFormatError as error:
        if str(error) == refusal:
            raise
    except Exception:  # the runtime's refusal says what it is
        return


def _order(path: Path, names: Mapping[str, object]) -> list[str]:
    """Return the names of the runtimes to ask, in order: edgedec's own for this kind of file, then other packages'."""
    first = [name for name in _FOR_ONNX if name in names] if is_onnx(path) else [*_PREFERRED]
    return first + [name for name in names if name not in (*_PREFERRED, *_FOR_ONNX, *_NEVER_CHOSEN)]


def _devices_of(plugin: plugins.Plugin) -> tuple[str, ...] | None:
    """Return the devices of a runtime; None where it is not installed or does not work."""
    try:
        return _devices(_instance(plugin.load(), plugin.package))
    except EdgedecError:
        return None


def _devices(runtime: Runtime) -> tuple[str, ...] | None:
    try:
        return runtime.report().devices
    except EdgedecError:  # loading with this runtime says why
        return None


def _may_have_gpu(devices: tuple[str, ...] | None) -> bool:
    """Return whether a GPU may be among a runtime's devices: yes where a working runtime names no devices."""
    return devices is not None and (not devices or any(name.upper() not in _NO_GPUS for name in devices))


def _gpu_note(options: LoadOptions, devices: Mapping[str, tuple[str, ...] | None]) -> str:
    """Return a note if layers on a GPU are wished for and there is no GPU, else "".

    -1 wishes for as many layers as possible, so without a GPU nothing is wrong. A number of layers is refused: taking
    the runtime that could have put them on a GPU would change the runtime for nothing.

    Raises:
        RequestError: A number of layers is wished for, and there is no GPU.
    """
    by_runtime = ", ".join(f"{name} has {' and '.join(names)}" for name, names in devices.items() if names)
    if not by_runtime or any(map(_may_have_gpu, devices.values())):
        return ""
    if (options.n_gpu_layers or 0) > 0:
        raise RequestError(
            f"{argument('n_gpu_layers')} is {options.n_gpu_layers}, and there is no GPU for them ({by_runtime}); leave "
            f"{argument('device')} and {argument('n_gpu_layers')} out, or install a llama-cpp-python that is built for "
            "your GPU"
        )
    return f"no layer is on a GPU, as none was found ({by_runtime})"


def _taking(
    plugin: plugins.Plugin, path: Path, options: LoadOptions | None, refusals: dict[str, EdgedecError]
) -> Runtime | None:
    """Return the runtime if it takes the file, and the options where they are given.

    Otherwise add its refusal to `refusals`, by its name: a RequestError where it takes the file but not the options.
    """
    try:
        runtime = _instance(plugin.load(), plugin.package)
        refusal = runtime.accepts(path)
        if refusal is None:
            if options is not None:
                read_options(own_options(runtime), options.runtime_options, f"the {plugin.name} runtime")
                runtime.plan(path, replace(options, on_progress=None))
            return runtime
        refusals[plugin.name] = UnsupportedModelError(refusal)
    except EdgedecError as error:
        refusals[plugin.name] = error
    except Exception as error:  # one plug-in's fault must not end the search
        message = f"{type(error).__name__}: {error} (report it to {plugin.package})"
        refusals[plugin.name] = UnsupportedModelError(message)
    return None


def _instance(plugin: Any, package: str = "its package") -> Runtime:
    """Return the runtime that an entry point names: an object, or a class without arguments (PluginError: it fails)."""
    try:
        runtime: Runtime = plugin() if isinstance(plugin, type) else plugin
    except EdgedecError:
        raise
    except Exception as error:
        raise PluginError(f"{type(error).__name__}: {error} (report it to {package})") from error
    return runtime


def _compare(choice: LoadPlan, rival: plugins.Plugin, options: LoadOptions, *, measure: bool) -> LoadPlan:
    """Return the choice with the rival in place of its runtime where the rival is known, or found now, to be faster."""
    first = choice.runtime
    is_known = isinstance(first, HasKernels) and first.is_fastest
    key = f"{_key(options)} {first.name} {is_known} {rival.name}"
    cached = _known(options, key)
    if cached is None:
        other = _taking(rival, choice.path, options, {}) if measure else None
        if other is None:
            return choice
        if is_known and not _may_have_gpu(_devices(other)):
            cached = Comparison("", is_faster=False)
        else:
            with stage(options.on_progress, _COMPARING, f"{first.name} with {rival.name}"):
                cached = compared_runtimes(choice.path, first, other, options)
        if cached is None:
            return choice
        probe_cache.put(options.cache_dir, _KIND, key, asdict(cached))
    other = _taking(rival, choice.path, options, {}) if cached.is_faster else None
    choice = replace(choice, reason=cached.reason)
    return choice if other is None else replace(choice, runtime=other, slower=first)


def _known(options: LoadOptions, key: str) -> Comparison | None:
    """Return what an earlier comparison found; None without one, and where what was kept is damaged."""
    cached = probe_cache.get(options.cache_dir, _KIND, key)
    hints = get_type_hints(Comparison)
    if not isinstance(cached, dict) or cached.keys() != hints.keys():
        return None
    return Comparison(**cached) if all(type(cached[name]) is kind for name, kind in hints.items()) else None


def _key(options: LoadOptions) -> str:
    """Return what a comparison depends on beside the runtimes: the machine, and options that change a forward's time.

    The model and the options of drafting are no part of it.
    """
    from edgedec import __version__

    return f"{__version__} {machine_key(options)} {options.kv_type}"
