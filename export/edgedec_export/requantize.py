"""Convert a GGUF to another type, with llama.cpp's quantizer.

    requantize("model-f16.gguf", "model-q4.gguf", "Q4_K_M")

The quantizer runs in a process of its own (`python -m edgedec_export.requantize`), so that a failed assertion of the
library, a full disk or Ctrl-C cannot end the calling process. Its log comes back line by line; progress is counted by
the tensors that the log names.
"""

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import IO

from edgedec.errors import ModelFormatError, RequestError, RuntimeUnavailableError, StorageError, argument
from edgedec.gguf.file import FLOATS, GGUF, read_gguf
from edgedec.gguf.tensor_types import FILE_TYPE_NAMES
from edgedec.processes import OWN_GROUP
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec_export.gguf_writer import new_file
from edgedec_runtimes.llamacpp.library import how_to_install, installed, llama
from edgedec_runtimes.shared.cpu_count import usable_cores

# The types that work well without an importance matrix, as this quantizer has none.
_NAMES = tuple(
    """
    F32 F16 BF16 Q8_0 Q6_K Q5_K_M Q5_K_S Q5_1 Q5_0 Q4_K_M Q4_K_S Q4_1 Q4_0 IQ4_NL IQ4_XS Q3_K_L Q3_K_M Q3_K_S Q2_K
    """.split()
)
TYPES: Mapping[str, int] = {name: number for number, name in FILE_TYPE_NAMES.items() if name in _NAMES}
"""The types to choose from, with llama.cpp's numbers for them (LLAMA_FTYPE)."""

_PROGRESS = re.compile(r"\[\s*\d+/\s*\d+\]\s+(\S+)")
_FAILURE = re.compile(r"failed to quantize: (.*)")
_BUFFER_BYTES = 256 << 20  # of a tensor's rows at once; the library's own default is 8 GiB
_LITTLE_SPACE = 16 << 20


def requantize(
    path: str | Path,
    out: str | Path,
    type_name: str,
    *,
    allow_requantize: bool = False,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Write a GGUF whose matrices are of another type, in one file, and return its path.

    Args:
        path: The model, or the first part of a split one; best in F32, F16 or BF16.
        out: The file to write; it appears when it is complete.
        type_name: A name of `TYPES`, in any case.
        allow_requantize: Allow matrices that are quantized already; quantizing them again loses more.
        force: Replace `out` where it exists.
        on_progress: Called with the phase "quantize" and the bytes of the source that are done.

    Raises:
        RequestError: There is no such type, a matrix is quantized already, or `out` may not be written.
        RuntimeUnavailableError: llama-cpp-python is absent, or the quantizer's process failed.
        ModelFormatError, UnsupportedModelError: The model is damaged, or llama.cpp cannot quantize it.
        StorageError: The model cannot be read, or the result cannot be written.
        CancelledError: `cancel` was cancelled.
    """
    file_type = TYPES.get(type_name.upper())
    if file_type is None:
        raise RequestError(f"type {type_name!r}: expected one of {', '.join(TYPES)}")
    gguf = read_gguf(path)
    if not allow_requantize:
        _refuse_quantized(gguf)
    if getattr(sys, "frozen", False):  # a frozen application has no interpreter to run the quantizer
        raise RuntimeUnavailableError(
            "quantizing needs a Python interpreter, and a frozen application has none; install edgedec with pip and "
            "quantize there"
        )
    if not installed():
        raise RuntimeUnavailableError(f"quantizing needs llama-cpp-python, which is not installed; {how_to_install()}")
    with new_file(Path(out), sources=gguf.paths, force=force) as part:
        arguments = [str(gguf.paths[0]), str(part), str(file_type), str(usable_cores()), str(int(allow_requantize))]
        _run(gguf, arguments, part, on_progress, cancel)
        _check(gguf, part)
    total = sum(tensor.n_bytes for tensor in gguf.tensors.values())
    report_progress(on_progress, "quantize", total, total, "bytes", gguf.paths[0].name)
    return Path(out)


def _refuse_quantized(gguf: GGUF) -> None:
    for tensor in gguf.tensors.values():
        if len(tensor.shape) > 1 and tensor.type not in FLOATS:
            raise RequestError(
                f"{gguf.paths[0]}: tensor {tensor.name!r} is {tensor.type.name} already, and quantizing it again "
                f"loses more; take a file in F16, BF16 or F32, or pass {argument('allow_requantize')}"
            )


def _check(gguf: GGUF, part: Path) -> None:
    """Check that the result has the source's tensors, in names and shapes."""
    made = {tensor.name: tensor.shape for tensor in read_gguf(part).tensors.values()}
    if made != {tensor.name: tensor.shape for tensor in gguf.tensors.values()}:
        raise ModelFormatError(f"{gguf.paths[0]}: llama.cpp wrote other tensors than it read; nothing was kept")


def _run(
    gguf: GGUF, arguments: list[str], part: Path, on_progress: OnProgress | None, cancel: CancelToken | None
) -> None:
    """Run the quantizer's process to its end; raise the error that describes its failure."""
    command = [sys.executable, "-m", "edgedec_export.requantize", *arguments]
    with tempfile.TemporaryFile() as errors:
        # In a group of its own it gets no Ctrl-C; we kill it. If we die, its standard input closes and it ends.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
            **OWN_GROUP,
        )
        with process:
            try:
                with cancel.calling(process.kill) if cancel is not None else nullcontext():
                    check_cancelled(cancel, "export")  # it may have been cancelled before `calling`
                    lines = _follow(gguf, process.stdout, on_progress)
                    code = process.wait()
            except BaseException:
                process.kill()
                raise
        check_cancelled(cancel, "export")
        if code != 0:
            errors.seek(0)
            lines += errors.read()[-4000:].decode(errors="replace").splitlines()
            raise _failure(gguf, part, code, lines)


def _follow(gguf: GGUF, stdout: IO[str] | None, on_progress: OnProgress | None) -> deque[str]:
    """Report progress until the process closes its output; return its last 50 lines."""
    assert stdout is not None, "it was opened with a pipe"
    total = sum(tensor.n_bytes for tensor in gguf.tensors.values())
    done = 0
    lines: deque[str] = deque(maxlen=50)
    for line in stdout:
        lines.append(line.strip())
        begun = _PROGRESS.match(line)
        if begun and begun[1] in gguf.tensors:
            report_progress(on_progress, "quantize", done, total, "bytes", gguf.paths[0].name)
            done += gguf.tensors[begun[1]].n_bytes
    return lines


def _failure(gguf: GGUF, part: Path, code: int, lines: deque[str]) -> Exception:
    """Return the error to raise for a process that failed with this exit status and these last lines."""
    reasons = [match[1] for line in lines if (match := _FAILURE.search(line))]
    reason = reasons[-1] if reasons else next((line for line in reversed(lines) if line), "it gave no reason")
    if shutil.disk_usage(part.parent).free < _LITTLE_SPACE:
        return StorageError(f"{part.parent}: the disk is full ({reason}); make room, or write to another disk")
    if code == 1 and reasons:
        return ModelFormatError(
            f"{gguf.paths[0]}: llama.cpp cannot quantize it ({reason}); choose another type or model"
        )
    return RuntimeUnavailableError(
        f"{gguf.paths[0]}: the quantizer's process ended with status {code} ({reason}); choose another type, or "
        "close other programs if memory was short"
    )


def _main(arguments: list[str]) -> int:
    """Quantize in this process and return the exit status.

    Args:
        arguments: Path of the source, path of the result, number of the file type, number of threads, and "1" where
            quantized matrices are allowed.
    """
    source, target, file_type, n_threads, allow_requantize = arguments
    threading.Thread(target=_end_with_parent, args=(Path(target),), daemon=True).start()
    logger = logging.getLogger("edgedec.llamacpp")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    api = llama()
    params = api.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.nthread = int(n_threads)
    params.allow_requantize = allow_requantize == "1"
    params.max_buf_size = _BUFFER_BYTES
    return 1 if api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)) else 0


def _end_with_parent(target: Path) -> None:
    """Wait until the parent process ends, which closes our standard input; then delete the result and exit."""
    os.read(0, 1)
    target.unlink(missing_ok=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
