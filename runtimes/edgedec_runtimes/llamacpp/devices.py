"""The devices that ggml has: their names, their memory, and what of the host's memory they share."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from edgedec.errors import RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import Device
from edgedec.plugins import install_command
from edgedec_runtimes.llamacpp.library import llama

# ggml_backend_dev_type of ggml-backend.h.
_GPU, _INTEGRATED_GPU = 1, 2
_UNIFIED_BACKENDS = ("MTL", "Metal")  # Apple's GPUs call themselves GPUs, and share the host's memory
_RPC = "RPC"
# Until a load has measured it. CUDA: its context, kernels, cuBLAS and graphs; nothing was measured for other back ends.
_DRIVER_BYTES = {"CUDA": 400_000_000, "ROCm": 400_000_000, _RPC: 0}
_OTHER_DRIVER_BYTES = 200_000_000


def devices(options: LoadOptions) -> tuple[Device, ...]:
    """Return the devices that llama.cpp would put layers on, in its order; or the one that `options.device` names.

    Devices of other machines come first, so that the last layers and the output are here. Integrated GPUs count only
    where this machine has no other GPU.

    Raises:
        RuntimeUnavailableError: There is no device of that name.
    """
    if options.device is not None:
        handles = [device_handle(options.device)]
        return tuple(_device(handle) for handle in handles if _kind(handle) in (_GPU, _INTEGRATED_GPU))
    gpus = [_device(handle) for handle in _handles() if _kind(handle) == _GPU]
    remote, local = [one for one in gpus if one.backend == _RPC], [one for one in gpus if one.backend != _RPC]
    if not local:
        local = [_device(handle) for handle in _handles() if _kind(handle) == _INTEGRATED_GPU]
    return (*remote, *local)


def device_array(names: Sequence[str]) -> Any:
    """Return ggml's handles of these devices and a null pointer, as llama.cpp takes them.

    Raises:
        RuntimeUnavailableError: There is no device of one of the names.
    """
    return (ctypes.c_void_p * (len(names) + 1))(*(device_handle(name) for name in names), None)


def device_handle(name: str) -> int:
    """Return ggml's handle of a device; "gpu" stands for the first GPU, before an integrated one.

    Raises:
        RuntimeUnavailableError: There is no device of that name.
    """
    handles = [handle for handle in _handles() if _name(handle) == name]
    if not handles and name.lower() == "gpu":
        handles = sorted((handle for handle in _handles() if _kind(handle) in (_GPU, _INTEGRATED_GPU)), key=_kind)
    if not handles:
        raise RuntimeUnavailableError(
            f"llama.cpp knows no device {name!r}; it knows {', '.join(device_names())} (edgedec doctor --all lists "
            f"them); for a GPU, install its driver and {install_command('gpu')}"
        )
    return handles[0]


def device_names() -> tuple[str, ...]:
    """Return the names of the devices that ggml has, such as "CPU" and "Vulkan0"."""
    return tuple(_name(handle) for handle in _handles())


def _device(handle: int) -> Device:
    library = llama()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    backend = library.ggml_backend_reg_name(library.ggml_backend_dev_backend_reg(handle)).decode()
    description = library.ggml_backend_dev_description(handle).decode(errors="replace")
    return Device(
        name=_name(handle),
        backend=backend,
        total_bytes=total.value,
        free_bytes=free.value,
        unified=_kind(handle) == _INTEGRATED_GPU or backend in _UNIFIED_BACKENDS,
        driver_bytes=_DRIVER_BYTES.get(backend, _OTHER_DRIVER_BYTES),
        description=description,
    )


def _handles() -> Iterator[int]:
    library = llama()
    return (int(library.ggml_backend_dev_get(index)) for index in range(library.ggml_backend_dev_count()))


def _name(handle: int) -> str:
    return str(llama().ggml_backend_dev_name(handle).decode())


def _kind(handle: int) -> int:
    return int(llama().ggml_backend_dev_type(handle))
