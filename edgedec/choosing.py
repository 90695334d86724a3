"""Which runtime runs a model: the one named, the first that takes it, or of two that do the faster, as measured."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Any

import numpy as np

from edgedec import plugins
from edgedec.errors import CancelledError, EdgedecError, RequestError, UnsupportedModelError
from edgedec.file_kinds import is_onnx
from edgedec.gguf import read_gguf
from edgedec.model import LoadOptions, Runtime
from edgedec.progress import CancelToken
from edgedec.remembered import machine_key, recall, remember

_PREFERRED = ("cpu", "llamacpp")
_FOR_ONNX = ("onnx", "npu")
_NEVER_CHOSEN = ("reference",)
_LIMIT_S = 3.0  # of a comparison, what must be loaded anyway not counted
_MARGIN = 0.95  # what the second must fall below of the first's time: the first is the one with all capabilities
_N_PROMPT, _N_STEPS = 8, 6
_TRIES, _MOST_TRIES = "tries", 3


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

    Where the first two both take it, the measured faster one is chosen; the comparison takes 3 s at most, is made only
    if `measure`, and is remembered per model and machine in the options' cache_dir.

    Raises:
        PluginError: No runtime has that name, or it does not import.
        UnsupportedModelError, ModelFormatError: The file can't be run.
        RequestError: A runtime takes the file, but not the options, and no other one does.
        CancelledError: The options' cancel came during the comparison.
    """
    if name != "auto":
        return Choice(path, _made(plugins.load_plugin(plugins.RUNTIMES, name)), {})
    found = plugins.plugins(plugins.RUNTIMES)
    order = _order(path, found)
    refusals: dict[str, str] = {}
    declined: list[str] = []
    for candidate in order:
        checked = None if candidate == order[-1] else options  # the last hope says itself what it has against them
        runtime = _taking(found[candidate], path, checked, refusals, declined)
        if runtime is None:
            continue
        choice = Choice(path, runtime, refusals, declined=tuple(declined))
        if options is None or len(_PREFERRED) < 2 or candidate != _PREFERRED[0]:
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
    seconds = recall(options.cache_dir, "runtimes", key)
    known = seconds if isinstance(seconds, dict) and first.name in seconds else {}
    if not known or (measure and _unfinished(known, rival.name)):
        other = _taking(rival, choice.path, options, choice.refusals) if measure else None
        if other is None:
            return choice
        seconds = _measure(choice.path, first, other, options) | {_TRIES: known.get(_TRIES, 0) + 1}
        remember(options.cache_dir, "runtimes", key, seconds)
    ours, theirs = seconds.get(first.name), seconds.get(rival.name)
    if not isinstance(ours, float):
        return choice
    if not isinstance(theirs, float):
        return replace(choice, reason=f"{first.name}: {1000 * ours:.1f} ms a token; {rival.name} took too long to load")
    reason = f"measured: {1000 * ours:.1f} ms a token on {first.name}, {1000 * theirs:.1f} on {rival.name}"
    if theirs < _MARGIN * ours:
        other = _taking(rival, choice.path, options, choice.refusals)
        if other is not None:
            return replace(choice, runtime=other, reason=reason, slower=first)
    return replace(choice, reason=reason)


def _unfinished(known: Mapping[str, Any], name: str) -> bool:
    """Tell whether a runtime was not measured, perhaps for a busy machine, and is worth another try."""
    return known.get(name) is None and known.get(_TRIES, 0) < _MOST_TRIES


def _key(path: Path, options: LoadOptions) -> str:
    """Name model, machine and options of a comparison."""
    from edgedec import __version__

    return f"{__version__} {read_gguf(path).header_hash} {machine_key(options)} {options.kv_type}"


def _measure(path: Path, first: Runtime, rival: Runtime, options: LoadOptions) -> dict[str, Any]:
    """Return each runtime's seconds of a step; the rival's load counts, the first's (which may make tiles) does not."""
    ours = _step_seconds(path, first, options, _LIMIT_S / 3, load_limited=False)
    theirs = _step_seconds(path, rival, options, _LIMIT_S * 2 / 3, load_limited=True)
    return {first.name: ours, rival.name: theirs}


def _step_seconds(
    path: Path, runtime: Runtime, options: LoadOptions, limit_s: float, *, load_limited: bool
) -> float | None:
    """Return the least seconds that one token took, or None when none was done in time."""
    outer, token = options.cancel or CancelToken(), CancelToken()
    seconds: list[float] = []
    small = replace(options, n_ctx=_N_PROMPT + _N_STEPS, n_parallel=1, max_rows=1, cancel=token)
    prompt = np.arange(_N_PROMPT, dtype=np.int32)
    outer.check("measuring the runtimes")
    try:
        with (
            outer.calling(token.cancel),
            _timer(limit_s if load_limited else None, token),
            runtime.load(path, small) as model,
            _timer(None if load_limited else limit_s, token),
        ):
            session = model.session(_N_PROMPT + _N_STEPS)
            with token.calling(session.cancel):
                session.forward(prompt, n_past=0)
                for i in range(_N_STEPS):
                    started = perf_counter()
                    session.forward(prompt[:1], n_past=_N_PROMPT + i)
                    seconds.append(perf_counter() - started)
                    token.check("measuring")
    except CancelledError:
        outer.check("measuring the runtimes")
    except EdgedecError:  # it will say so when it is asked for
        return None
    return min(seconds, default=None)


@contextmanager
def _timer(limit_s: float | None, token: CancelToken) -> Iterator[None]:
    """Cancel the token when the time is over."""
    if limit_s is None:
        yield
        return
    timer = Timer(limit_s, token.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
