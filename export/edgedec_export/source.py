"""What every export to ONNX needs of its source, a GGUF: vectors, rotary factors, progress, facts for the manifest."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress


def read_vector(gguf: GGUF, name: str) -> NDArray[np.float32]:
    """Return a tensor of the type F32 as float32[n].

    Raises:
        ModelFormatError: The file has no such tensor, got shorter, or the tensor holds NaN or an infinity.
        ModelNotFoundError, StorageError: The file is gone, or cannot be read.
    """
    values = np.frombuffer(gguf.read_tensor_bytes(name), "<f4").astype(np.float32)
    require_finite(gguf, name, values)
    return values


def require_finite(gguf: GGUF, name: str, *arrays: NDArray[np.float32] | None) -> None:
    """Check what was read of a tensor; None stands for an array that its type does not have.

    Raises:
        ModelFormatError: An array holds NaN or an infinity.
    """
    if not all(np.isfinite(array).all() for array in arrays if array is not None):
        path = gguf.paths[gguf.tensors[name].shard]
        raise ModelFormatError(
            f"{path}: tensor {name!r} holds NaN or an infinity, expected finite numbers; download the file again"
        )


def rope_factors(gguf: GGUF) -> NDArray[np.float32] | None:
    """Return float32[n_rot/2], what Llama 3 divides rotary frequencies by; None for a model without them.

    Raises:
        ModelFormatError, ModelNotFoundError, StorageError: As `read_vector`.
    """
    name = "rope_freqs.weight"
    return read_vector(gguf, name) if name in gguf.tensors else None


def tensor_steps(gguf: GGUF, on_progress: OnProgress | None, cancel: CancelToken | None) -> Callable[[str], None]:
    """Return a function to call with each tensor's name once that tensor is written.

    The function reports the bytes of the source that are done (a tensor that is used twice counts once), and raises
    CancelledError when `cancel` was cancelled.
    """
    total = sum(tensor.n_bytes for tensor in gguf.tensors.values())
    done: set[str] = set()

    def step(name: str) -> None:
        check_cancelled(cancel, f"exporting {gguf.paths[0].name}")
        done.add(name)
        n_bytes = sum(gguf.tensors[one].n_bytes for one in done)
        report_progress(on_progress, "export", n_bytes, total, "bytes", gguf.paths[0].name)

    return step


def source_facts(gguf: GGUF) -> dict[str, Any]:
    """Return what a manifest says of the source: file name, SHA-256 of the header, size in bytes."""
    return {"name": gguf.paths[0].name, "sha256_of_header": gguf.header_hash, "bytes": gguf.n_bytes}
