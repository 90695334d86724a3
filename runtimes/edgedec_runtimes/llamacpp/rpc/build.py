"""Compiles ggml's RPC library for the installed llama-cpp-python.

    python -m edgedec_runtimes.llamacpp.rpc.build [SDIST]

Only two files of llama.cpp are compiled, against the libraries that llama-cpp-python has installed. The sources are
those of its own release, which pip fetches (some 80 MB) unless SDIST names the file.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from edgedec.errors import EdgedecError, RuntimeUnavailableError
from edgedec_runtimes.llamacpp.rpc.library import BUILT_FOR, built_library
from edgedec_runtimes.llamacpp.trial import folders

_SOURCES = ("ggml-rpc.cpp", "transport.cpp")
_FLAGS = tuple(
    """
    -O2 -fPIC -shared -std=c++17 -DGGML_SHARED -DGGML_BACKEND_SHARED -DGGML_BACKEND_BUILD -DGGML_BACKEND_DL -pthread
    """.split()
)


def build(sdist: Path | None = None, target: Path | None = None) -> Path:
    """Compile the library and return its path, by default where edgedec looks for it.

    Raises:
        RuntimeUnavailableError: There is no compiler, the sources can't be fetched, or they do not compile.
    """
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise RuntimeUnavailableError(
            "compiling the RPC library needs Linux or macOS, with a C++ compiler (g++, or Xcode's command line tools)"
        )
    base = next((path for folder in folders(BUILT_FOR) for path in sorted(folder.glob("libggml-base.*"))), None)
    if base is None:
        raise RuntimeUnavailableError(
            "llama-cpp-python has no libggml-base beside it; install it by pip, on Linux or macOS"
        )
    target = built_library() if target is None else target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ggml = _unpacked(_fetched(folder) if sdist is None else sdist, folder)
        made = folder / target.name
        includes = [f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"]
        sources = [str(ggml / "src" / "ggml-rpc" / name) for name in _SOURCES]
        _run([compiler, *_FLAGS, *includes, *sources, str(base), f"-Wl,-rpath,{base.parent}", "-o", str(made)])
        shutil.move(made, target)
    return target


def _fetched(folder: Path) -> Path:
    name = f"{BUILT_FOR.distribution}=={BUILT_FOR.version}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder)]
    _run([*pip, name])
    return next(folder.glob("llama_cpp_python-*.tar.gz"))


def _unpacked(sdist: Path, folder: Path) -> Path:
    """Unpack ggml's sources; return their folder."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if "/vendor/llama.cpp/ggml/" in member.name]
        archive.extractall(folder, members, filter="data")
    return next(folder.glob("*/vendor/llama.cpp/ggml"))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeUnavailableError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-1000:]}")


if __name__ == "__main__":
    try:
        print(build(*map(Path, sys.argv[1:2])))
    except EdgedecError as error:
        sys.exit(f"edgedec: {error}")
