"""Loads the library of llama.cpp that edgedec_runtimes.llamacpp.trial chooses, and sends its log to `logging`."""

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from edgedec.errors import RuntimeAbsentError, RuntimeUnavailableError
from edgedec.plugins import install_command
from edgedec_runtimes.llamacpp import trial
from edgedec_runtimes.llamacpp.binding import LOG_CALLBACK, RELEASES, Release, bind, bind_mtmd
from edgedec_runtimes.shared.native import loaded_libraries

logger = logging.getLogger("edgedec.llamacpp")
logger.addHandler(logging.NullHandler())  # without one, `logging` would print warnings itself

# ggml's levels of log lines; the comment in the binding lists older numbers.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_WARNING, _ERROR, _CONTINUED = 3, 4, 5
_OMP_PAUSE_HARD = 2

_log_lines: deque[tuple[int, str]] = deque(maxlen=4000)
_log_lock = threading.Lock()
_keep_alive: list[Any] = []


def installed() -> bool:
    """Return whether a known library of llama.cpp is installed, without loading it."""
    return any(map(trial.folders, RELEASES))


def how_to_install() -> str:
    """Return a phrase that says how to install a library of llama.cpp."""
    wheel = install_command(RELEASES[1].distribution)
    return f"install it with: {install_command('llamacpp')} (or, without a compiler: {wheel})"


def how_to_mend() -> str:
    """Return a phrase that says what to do where the library ends the processes that use it."""
    distribution = RELEASES[0].distribution
    anew = f"build it here (pip install --force-reinstall --no-cache-dir --no-binary {distribution} {distribution})"
    first = anew if chosen() == RELEASES[0] else "hide the GPU from it (GGML_VK_VISIBLE_DEVICES=)"
    return f"{first}, look after the GPU's driver, or use another runtime (--runtime cpu)"


def chosen() -> Release:
    """Return the release whose library this process uses (RuntimeUnavailableError where none is installed)."""
    choice = trial.choice()
    if choice is None:
        names = " or ".join(map(str, RELEASES))
        raise RuntimeAbsentError(f"the llamacpp runtime needs {names}; {how_to_install()}")
    return choice.release


@cache
def llama() -> Any:
    """Return the functions and structs of llama.cpp, checked and initialised; another process tries them first.

    Raises:
        RuntimeUnavailableError: No library is installed, or it does not load, crashes, or is of another release.
    """
    if (crash := trial.complaint()) is not None:
        raise RuntimeUnavailableError(
            f"llama.cpp's library of {chosen()} can't be used on this machine: {crash}; {how_to_mend()}"
        )
    return load_library(chosen())


def load_library(release: Release) -> Any:
    """Return the functions and structs of a release's llama.cpp without trying them first; raises as llama()."""
    folders = trial.folders(release)
    try:
        api = bind(release, folders)
    except (OSError, AttributeError) as error:  # a library that does not load on this machine
        raise RuntimeUnavailableError(
            f"llama.cpp's library of {release} does not load here ({error}); {how_to_install()}"
        ) from error
    take_log(api.llama_log_set)
    for folder in folders if not api.ggml_backend_dev_count() else ():
        api.ggml_backend_load_all_from_path(os.fsencode(folder))
    api.llama_backend_init()
    _survive_forks()
    return api


@cache
def _survive_forks() -> None:
    """Let GNU's OpenMP end the threads of a thread that forks, before it does; the next forward begins them again.

    A child has none of these threads, and would wait for them for ever. Other OpenMP libraries see to it themselves.
    """
    for path in loaded_libraries("libgomp"):
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # since OpenMP 5
        if pause is not None:
            os.register_at_fork(before=partial(pause, _OMP_PAUSE_HARD))


@cache
def mtmd() -> Any:
    """Return the functions and structs of libmtmd and llama.cpp, which nothing has tried; raises as llama()."""
    release = chosen()
    api = load_library(release)
    try:
        bind_mtmd(api, trial.folders(release))
    except (OSError, AttributeError) as error:
        raise RuntimeUnavailableError(
            f"pictures are encoded by libmtmd of {release}, which does not load here: {error}; {how_to_install()}"
        ) from error
    take_log(api.mtmd_log_set)
    return api


def take_log(set_log: Callable[[Any, None], None]) -> None:
    """Send the log of one of llama.cpp's libraries to `logging`, by its function that sets where the log goes."""
    callback = LOG_CALLBACK(_on_log)
    _keep_alive.append(callback)
    set_log(callback, None)


def version() -> str:
    """Return the versions of the package and of its llama.cpp (RuntimeUnavailableError where none is installed)."""
    return f"{chosen()} (llama.cpp {chosen().llama})"


def _on_log(level: int, text: bytes, _user_data: Any) -> None:
    """Pass a line of llama.cpp's log on to `logging`; called from C, so no exception may escape."""
    try:
        line = text.decode("utf-8", errors="replace")
        with _log_lock:
            if level == _CONTINUED and _log_lines:
                level = _log_lines[-1][0]
            _log_lines.append((level, line))
        stripped = line.rstrip()
        if stripped.strip("."):
            logger.log(_LEVELS.get(level, logging.DEBUG), "%s", stripped)
    except Exception:  # logging handlers are the application's; their errors must not cross into C
        return


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Yield a list that holds, when the block ends, the lines that llama.cpp logged in the block."""
    with _log_lock:
        _log_lines.clear()
    lines: list[str] = []
    try:
        yield lines
    finally:
        with _log_lock:
            lines.extend(line.rstrip() for _, line in _log_lines)


def last_complaint() -> str:
    """Return the last warning or error that llama.cpp logged, for the message of an exception."""
    with _log_lock:
        complaints = [line.strip() for level, line in _log_lines if level in (_WARNING, _ERROR) and line.strip()]
    return complaints[-1] if complaints else "it gave no reason"
