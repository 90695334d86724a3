"""Tries libraries of llama.cpp in processes of their own, and chooses the one that this process loads.

A library for another processor, or beside an unfit driver, ends the process that uses it, and nobody could read why; a
library of another release, or an unfit driver, computes nonsense. So a tiny model runs there first, on the devices that
a model would take, and its logits are compared with those of the reference runtime. Kernels for rearranged weights are
tried apart, as a model runs without them: GCC 12 compiles llama.cpp's for Intel's AMX so that a prompt ends the process
(its `_tile_loadconfig`, in amxtileintrin.h, tells the compiler of 8 of the 64 bytes that the processor reads). What was
tried is remembered until the library, the processor, the drivers or the variables that choose devices change.
"""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from edgedec import processor
from edgedec.errors import RuntimeUnavailableError
from edgedec.memory.system import available_bytes
from edgedec.storage import probe_cache
from edgedec.storage.cache_files import cache_folder
from edgedec_runtimes.child.process import child_environment
from edgedec_runtimes.llamacpp.binding import RELEASES, Release

logger = logging.getLogger("edgedec.llamacpp")

VARIABLE = "EDGEDEC_LLAMA_LIBRARY"
"""The environment variable that names the package to take, where several have llama.cpp's library."""
_PATIENCE_S = 120.0
_BYTES = 130_000_000  # what the process that tries it holds: 58 MB, 124 MB with Vulkan's library
_PROGRAM = "edgedec_runtimes.llamacpp.tiny_run"
_PLAIN = "plain"  # the program's argument: weights are not rearranged
_DEVICE_VARIABLES = tuple(
    """
    CUDA_VISIBLE_DEVICES GGML_VK_VISIBLE_DEVICES HIP_VISIBLE_DEVICES LD_LIBRARY_PATH VK_DRIVER_FILES VK_ICD_FILENAMES
    """.split()
)
_DRIVERS = ("/dev/dri", "/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of trying a library.

    Attributes:
        repacked: How it failed with rearranged weights; None where a model ran.
        plain: How it failed without them, where that was tried, too; None where a model ran.
        gpus: The devices of it that are not the CPU.
    """

    repacked: str | None = None
    plain: str | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """The release whose library is used, and why, as a clause."""

    release: Release
    reason: str


def folders(release: Release) -> tuple[Path, ...]:
    """Return the folders in which a release's package has its libraries; none where it is not installed."""
    package = importlib.util.find_spec(release.package)
    if package is None or package.origin is None:
        return ()
    paths = (Path(package.origin).parent / name for name in ("lib", "bin"))
    return tuple(folder for folder in paths if folder.is_dir())


@cache
def choice() -> Chosen | None:
    """Return which of the installed libraries is used; None where none is.

    The first of RELEASES is used, which was built for this machine, unless only another one finds a GPU, or runs.

    Raises:
        RuntimeUnavailableError: The environment variable names a package that is not installed.
    """
    there = [release for release in RELEASES if folders(release)]
    if path := os.environ.get(VARIABLE):
        for release in there:
            if path in (release.package, release.distribution):
                return Chosen(release, f"{VARIABLE} names it")
        names = " or ".join(release.distribution for release in there) or "nothing, as none is installed"
        raise RuntimeUnavailableError(f"{VARIABLE} names {path!r}; unset it, or let it name {names}")
    if len(there) < 2:
        return Chosen(there[0], "no other one is installed") if there else None
    running = [release for release in there if outcome(release).plain is None]
    for release in running:
        if gpus := outcome(release).gpus:
            return Chosen(release, f"it has {', '.join(gpus)}")
    why = "no library that runs has a GPU" if running else "no library runs here"
    return Chosen((running or there)[0], why)


def complaint() -> str | None:
    """Return how llama.cpp's library failed in the processes that tried it; None where a model ran, or did before."""
    chosen = choice()
    return None if chosen is None else outcome(chosen.release).plain


def repack_complaint() -> str | None:
    """Return how the library failed in the process that tried it with rearranged weights; None where a model ran."""
    chosen = choice()
    return None if chosen is None else outcome(chosen.release).repacked


@cache
def outcome(release: Release) -> Outcome:
    """Return what comes, or came before, of trying a library that is installed.

    In a frozen application nothing is tried, as it has no Python to start. Nor is it where the system has too little
    memory free for one more process: no model fits there, and the system would end a process for want of memory.
    """
    if getattr(sys, "frozen", False):
        return Outcome()
    folder, key = cache_folder(), _key(release)
    if (remembered := _remembered(probe_cache.get(folder, "llamacpp", key))) is not None:
        return remembered
    free = available_bytes()
    if free is not None and free < _BYTES:
        return Outcome()
    result = tried(release)
    if result.repacked is not None:
        plain = tried(release, _PLAIN)
        result = Outcome(result.repacked, plain.repacked, plain.gpus)
    if result.plain is None:
        probe_cache.put(folder, "llamacpp", key, asdict(result))
    if result.plain is None and result.repacked is not None:
        logger.warning("llama.cpp's weights will not be rearranged: %s", result.repacked)
    return result


def _remembered(stored: object) -> Outcome | None:
    match stored:
        case {"repacked": str() | None as repacked, "plain": None, "gpus": list() as gpus}:
            return Outcome(repacked, None, tuple(map(str, gpus)))
    return None


def _key(release: Release) -> str:
    """Return all that the outcome depends on."""
    places = folders(release)
    files = [(file.name, file.stat()) for folder in places for file in sorted(folder.glob("*"))]
    states = [(name, state.st_size, state.st_mtime_ns) for name, state in files]
    chosen = [os.environ.get(name) for name in _DEVICE_VARIABLES]
    drivers = [sorted(os.listdir(path)) if os.path.isdir(path) else None for path in _DRIVERS]
    return f"{release} {places} {states} {chosen} {drivers} {processor.cpu_name()} {sys.version}"


def tried(release: Release, *arguments: str) -> Outcome:
    """Let a process of its own run a tiny model, and say how the library failed, as Outcome.repacked; None if not."""
    command = [sys.executable, "-P", "-m", _PROGRAM, release.package, *arguments]
    try:
        done = subprocess.run(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(f"it did not run a tiny model within {_PATIENCE_S:g} s")
    except OSError:  # no process can be started here: nothing is known
        return Outcome()
    if (failure := ending(done.returncode)) is not None or done.returncode:
        return Outcome(failure)
    gpus, wrong = json.loads(done.stdout.splitlines()[-1])
    return Outcome(wrong, None, tuple(gpus))


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
