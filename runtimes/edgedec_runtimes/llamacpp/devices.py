"""The devices that ggml has: their names, their memory, and what of the host's memory they share."""

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from edgedec.errors import RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import Device

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
    found = [_device(handle) for handle in _handles() if _kind(handle) == _GPU]
    remote, own = [one for one in found if one.backend == _RPC], [one for one in found if one.backend != _RPC]
    if not own:
        own = [_device(handle) for handle in _handles() if _kind(handle) == _INTEGRATED_GPU]
    return (*remote, *own)


def device_array(names: Sequence[str]) -> Any:
    """Return ggml's handles of these devices and a null pointer, as llama.cpp takes them.

    Raises:
        RuntimeUnavailableError: There is no device of one of the names.
    """
    return (ctypes.c_void_p * (len(names) + 1))(*(device_handle(name) for name in names), None)


def device_handle(name: str) -> int:
    """Return ggml's handle of a device (RuntimeUnavailableError where there is no device of that name)."""
    found = next((handle for handle in _handles() if _name(handle) == name), None)
    if found is None:
        raise RuntimeUnavailableError(
            f"llama.cpp knows no device {name!r}; it knows {', '.join(device_names())} "
            "(edgedec doctor --all lists them)"
        )
    return found


def device_names() -> tuple[str, ...]:
    """Return the names of the devices that ggml has, such as "CPU" and "Vulkan0"."""
    return tuple(_name(handle) for handle in _handles())


def _device(handle: int) -> Device:
    library = _ggml()
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
    library = _ggml()
    return (int(library.ggml_backend_dev_get(index)) for index in range(library.ggml_backend_dev_count()))


def _name(handle: int) -> str:
    return str(_ggml().ggml_backend_dev_name(handle).decode())


def _kind(handle: int) -> int:
    return int(_ggml().ggml_backend_dev_type(handle))


@cache
def _ggml() -> Any:
    """Return ggml's library; llama_cpp loads it, but binds none of these functions."""
    from llama_cpp._ggml import libggml

    size = ctypes.POINTER(ctypes.c_size_t)
    for name, result, arguments in (
        ("ggml_backend_dev_count", ctypes.c_size_t, ()),
        ("ggml_backend_dev_get", ctypes.c_void_p, (ctypes.c_size_t,)),
        ("ggml_backend_dev_name", ctypes.c_char_p, (ctypes.c_void_p,)),
        ("ggml_backend_dev_description", ctypes.c_char_p, (ctypes.c_void_p,)),
        ("ggml_backend_dev_memory", None, (ctypes.c_void_p, size, size)),
        ("ggml_backend_dev_type", ctypes.c_int, (ctypes.c_void_p,)),
        ("ggml_backend_dev_backend_reg", ctypes.c_void_p, (ctypes.c_void_p,)),
        ("ggml_backend_reg_name", ctypes.c_char_p, (ctypes.c_void_p,)),
    ):
        function = getattr(libggml, name)
        function.restype, function.argtypes = result, list(arguments)
    return libggml
