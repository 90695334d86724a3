"""What Vulkan says of this machine's GPUs: names, kinds and memory. It calls the driver, which may end the process."""

import ctypes
from dataclasses import dataclass
from typing import Any

from edgedec_runtimes.shared.native import VULKAN

_KINDS = {1: "integrated", 2: "discrete", 3: "virtual", 4: "software"}
_MEMORY_2, _BUDGET, _INSTANCE, _APPLICATION = 1_000_059_006, 1_000_237_000, 1, 0  # VkStructureType
_VERSION_1_1 = 1 << 22 | 1 << 12
_LOCAL = 1  # VK_MEMORY_HEAP_DEVICE_LOCAL_BIT
_PROPERTY_BYTES = 4096  # more than the 824 of VkPhysicalDeviceProperties
_MOST = 16  # devices

U32, U64 = ctypes.c_uint32, ctypes.c_uint64


class _Application(ctypes.Structure):
    _fields_ = (
        ("type", U32),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", U32),
        ("engine", ctypes.c_char_p),
        ("engine_version", U32),
        ("api", U32),
    )


class _Instance(ctypes.Structure):
    _fields_ = (
        ("type", U32),
        ("next", ctypes.c_void_p),
        ("flags", U32),
        ("application", ctypes.POINTER(_Application)),
        ("n_layers", U32),
        ("layers", ctypes.c_void_p),
        ("n_extensions", U32),
        ("extensions", ctypes.c_void_p),
    )


class _Heap(ctypes.Structure):
    _fields_ = (("n_bytes", U64), ("flags", U32))


class _Budget(ctypes.Structure):
    _fields_ = (("type", U32), ("next", ctypes.c_void_p), ("budget", U64 * 16), ("usage", U64 * 16))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("type", U32),
        ("next", ctypes.POINTER(_Budget)),
        ("n_types", U32),
        ("types", U32 * 64),
        ("n_heaps", U32),
        ("heaps", _Heap * 16),
    )


@dataclass(frozen=True, slots=True)
class VulkanDevice:
    """A device of Vulkan.

    Attributes:
        name: Its full name, as the driver has it.
        driver: The driver's version, and those that Vulkan and the maker count by.
        kind: "discrete", "integrated", "virtual", "software" or "other".
        total_bytes: The memory of its local heaps.
        free_bytes: What can still be taken of these; all where the driver does not say it.
    """

    name: str
    driver: str
    kind: str
    total_bytes: int
    free_bytes: int


def vulkan_devices() -> list[VulkanDevice]:
    """Return the devices of Vulkan, those with memory of their own first (OSError where no loader is installed)."""
    library = ctypes.CDLL(VULKAN)
    application = _Application(_APPLICATION, None, b"edgedec", 1, None, 0, _VERSION_1_1)
    info, instance = _Instance(_INSTANCE, application=ctypes.pointer(application)), ctypes.c_void_p()
    if library.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) != 0:
        return []
    count, handles = U32(_MOST), (ctypes.c_void_p * _MOST)()
    try:
        done = library.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
        found = [_device(library, handles[i]) for i in range(count.value)] if done >= 0 else []
    finally:
        library.vkDestroyInstance(instance, None)
    order = ("discrete", "integrated", "virtual", "other", "software")
    return sorted(found, key=lambda device: order.index(device.kind))


def _device(library: Any, handle: int | None) -> VulkanDevice:
    """Return what the driver says of a device: u32s for versions, vendor, device and kind, and 256 bytes of name."""
    raw = ctypes.create_string_buffer(_PROPERTY_BYTES)
    library.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), raw)
    api, driver, vendor, device, kind = (U32 * 5).from_buffer(raw)
    name = raw.raw[20:276].split(b"\0")[0].decode(errors="replace")
    budget = _Budget(_BUDGET)
    memory = _Memory(_MEMORY_2, ctypes.pointer(budget))
    library.vkGetPhysicalDeviceMemoryProperties2(ctypes.c_void_p(handle), ctypes.byref(memory))
    local = [i for i in range(min(16, memory.n_heaps)) if memory.heaps[i].flags & _LOCAL]
    total = sum(memory.heaps[i].n_bytes for i in local)
    free = sum(max(0, budget.budget[i] - budget.usage[i]) for i in local)
    version = f"{api:x} {driver:x} {vendor:x}:{device:x}"
    return VulkanDevice(name, version, _KINDS.get(kind, "other"), total, min(free, total) or total)
