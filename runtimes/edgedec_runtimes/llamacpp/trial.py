"""Tries llama.cpp's library in a process of its own before this process loads it for the first time.

A library for another processor, or beside an unfit driver, ends the process that uses it, and nobody could read why.
Kernels for rearranged weights are tried apart, as a model runs without them: GCC 12 compiles llama.cpp's for Intel's
AMX so that a prompt ends the process (its `_tile_loadconfig`, in amxtileintrin.h, tells the compiler of 8 of the 64
bytes that the processor reads). What was tried is remembered until the library, the processor or the variables that
choose devices change.
"""

import importlib.util
import logging
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from edgedec.memory.system import available_bytes
from edgedec.storage import probe_cache
from edgedec_runtimes.shared import processor
from edgedec_runtimes.shared.child_environment import child_environment

logger = logging.getLogger("edgedec.llamacpp")

_PATIENCE_S = 120.0
_BYTES = 60_000_000  # what the process that tries it holds: 54 MB were measured
_PROGRAM = "edgedec_runtimes.llamacpp.tiny_run"
_PLAIN = "plain"  # the program's argument: weights are not rearranged
_RUNS = "it runs, with rearranged weights but for"  # the key of what is remembered: a complaint, or None
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH")


def complaint() -> str | None:
    """Return how llama.cpp's library ended the processes that tried it; None where a model ran, or did before."""
    return complaints()[1]


def repack_complaint() -> str | None:
    """Return how the library ended the process that tried it with rearranged weights; None where a model ran."""
    return complaints()[0]


@cache
def complaints() -> tuple[str | None, str | None]:
    """Return how the library ended a process with rearranged weights, and without them, where that was tried, too.

    In a frozen application nothing is tried, as it has no Python to start. Nor is it where the system has too little
    memory free for one more process: no model fits there, and the system would end a process for want of memory.
    """
    key = _key()
    if getattr(sys, "frozen", False) or key is None:
        return None, None
    folder = probe_cache.cache_folder(None)
    known = probe_cache.get(folder, "llamacpp", key)
    if isinstance(known, dict) and _RUNS in known:
        return known[_RUNS], None
    free = available_bytes()
    if free is not None and free < _BYTES:
        return None, None
    repacked = tried()
    plain = None if repacked is None else tried(_PLAIN)
    if plain is None:
        probe_cache.put(folder, "llamacpp", key, {_RUNS: repacked})
    if plain is None and repacked is not None:
        logger.warning("llama.cpp's weights will not be rearranged: %s", repacked)
    return repacked, plain


def _key() -> str | None:
    """Return all that the outcome depends on; None where llama-cpp-python is not installed."""
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        return None
    files = sorted((Path(package.origin).parent / "lib").glob("*"))
    states = [(file.name, (state := file.stat()).st_size, state.st_mtime_ns) for file in files]
    chosen = [os.environ.get(name) for name in _DEVICE_VARIABLES]
    return f"{package.origin} {states} {chosen} {processor.cpu_name()} {sys.version}"


def tried(*arguments: str) -> str | None:
    """Let a process of its own run a tiny model, and say how the library ended it; None where it did not."""
    command = [sys.executable, "-P", "-m", _PROGRAM, *arguments]
    try:
        done = subprocess.run(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not run a tiny model within {_PATIENCE_S:g} s"
    except OSError:  # no process can be started here: nothing is known
        return None
    return ending(done.returncode)


def ending(code: int) -> str | None:
    """Say how a process ended; None where it ended well, or with a Python exception, which tells its reason itself."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        why = ", so it was probably built for another processor" if name == "SIGILL" else ""
        return f"it ended the process that tried it ({name}){why}"
    return f"it ended the process that tried it (exit status {code:#x})" if code > 1 else None
