"""Finds the GPU that ONNX Runtime's WebGPU plug-in would use, in a process that a broken driver may end.

python -m edgedec_export.webgpu.finding       # prints what was found, as JSON
"""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from edgedec.errors import EdgedecError, RuntimeAbsentError, RuntimeUnavailableError
from edgedec.memory.system import available_bytes
from edgedec.memory_plan import Device
from edgedec.plugins import install_command, installed_version
from edgedec_runtimes.child.process import child_environment
from edgedec_runtimes.llamacpp.trial import ending
from edgedec_runtimes.onnx.library import load_library
from edgedec_runtimes.onnx.providers import PROVIDERS, choose_provider
from edgedec_runtimes.shared.native import VULKAN, VULKAN_ALONE

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
        kind: "discrete", "integrated", "virtual", "software" or "other".
        total_bytes: The memory of its local heaps.
        free_bytes: What can still be taken of these; all where the driver does not say it.
    """

    name: str
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
        devices = [_device(library, handles[i]) for i in range(count.value)] if done >= 0 else []
    finally:
        library.vkDestroyInstance(instance, None)
    order = ("discrete", "integrated", "virtual", "other", "software")
    return sorted(devices, key=lambda device: order.index(device.kind))


def _device(library: Any, handle: int | None) -> VulkanDevice:
    """Return what the driver says of a device: five u32, of which the last is its kind, and 256 bytes of name."""
    raw = ctypes.create_string_buffer(_PROPERTY_BYTES)
    library.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), raw)
    kind = (U32 * 5).from_buffer(raw)[4]
    name = raw.raw[20:276].split(b"\0")[0].decode(errors="replace")
    budget = _Budget(_BUDGET)
    memory = _Memory(_MEMORY_2, ctypes.pointer(budget))
    library.vkGetPhysicalDeviceMemoryProperties2(ctypes.c_void_p(handle), ctypes.byref(memory))
    local = [i for i in range(min(16, memory.n_heaps)) if memory.heaps[i].flags & _LOCAL]
    total = sum(memory.heaps[i].n_bytes for i in local)
    free = sum(max(0, budget.budget[i] - budget.usage[i]) for i in local)
    return VulkanDevice(name, _KINDS.get(kind, "other"), total, min(free, total) or total)


NAME = "WebGPU"
"""The device's name in plans and reports. There is one, as the plug-in chooses among the GPUs by itself."""

PROVIDER = PROVIDERS["webgpu"]
SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
"""The plug-in's own variable: with the value 1 it takes a Vulkan that computes on the CPU, for tests."""

_PATIENCE_S = 60.0
_DRIVER_BYTES = 200_000_000  # until a load has measured it
_LOADER = "install Vulkan's loader and your card's driver (on Debian and Ubuntu: apt install libvulkan1 " + (
    "mesa-vulkan-drivers; for NVIDIA's cards their own driver brings it)"
)


@dataclass(frozen=True, slots=True)
class Found:
    """What the process that looked for a GPU found.

    Attributes:
        version: onnxruntime's version and the plug-in's; empty where they can't be used.
        refusal: Why no GPU can be used, and what to install; empty where one can.
        absent: Whether a package or a GPU is lacking, rather than that one does not work.
        devices: What Vulkan has, the likeliest choice of the plug-in first; empty on systems without Vulkan.
    """

    version: str = ""
    refusal: str = ""
    devices: list[VulkanDevice] = field(default_factory=list)
    absent: bool = False


@cache
def gpu_report() -> Found:
    """Return what a process of its own finds now; the first answer is kept for as long as this process runs."""
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec(str(PROVIDER.plug_in)) is None:
        return Found(refusal=f"the package {PROVIDER.package} is not installed; {install_command('gpu')}", absent=True)
    if getattr(sys, "frozen", False):
        return Found(refusal="a frozen application has no Python to run a GPU's process with; use the cpu runtime")
    return look()


def look() -> Found:
    """Let a process of its own look for a GPU."""
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(
            command, env=child_environment(), capture_output=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Found(refusal=f"the process that looked for a GPU gave no answer ({error}); update the card's driver")
    with suppress(ValueError, TypeError, KeyError, IndexError):
        report = json.loads(done.stdout.splitlines()[-1])
        devices = [VulkanDevice(**device) for device in report.pop("devices")]
        return Found(**report, devices=devices)
    how = ending(done.returncode) or f"the process that looked for a GPU ended with status {done.returncode}"
    return Found(refusal=f"the card's driver can't be used: {how}; update the driver")


def require() -> Found:
    """Return what found() returns (RuntimeUnavailableError, with what to install, where no GPU can be used)."""
    report = gpu_report()
    if report.refusal:
        kind = RuntimeAbsentError if report.absent else RuntimeUnavailableError
        raise kind(f"no GPU can be used: {report.refusal}")
    return report


def as_device(report: Found) -> Device:
    """Return the GPU for memory plans. One whose memory is unknown is taken to share the host's, as Apple's do."""
    if not report.devices:
        free = available_bytes() or 0
        return Device(NAME, NAME, free, free, unified=True, driver_bytes=_DRIVER_BYTES)
    gpu = report.devices[0]
    unified = gpu.kind != "discrete"
    return Device(NAME, NAME, gpu.total_bytes, gpu.free_bytes, unified, _DRIVER_BYTES, description=gpu.name)


def _look_here() -> Found:
    """Look in this process, which the driver may end."""
    devices: list[VulkanDevice] = []
    ort: Any = None
    try:
        ort = load_library()
        choose_provider(ort, PROVIDER.device)
        release = installed_version(PROVIDER.package) or "of an unknown version"
        version = f"onnxruntime {ort.__version__}, {PROVIDER.package} {release}"
    except EdgedecError as error:
        is_missing = "finds no device" in str(error)
        refusal = f"onnxruntime {ort.__version__} finds none; {_LOADER}" if is_missing else str(error)
        return Found(refusal=refusal, absent=is_missing)
    try:
        devices = vulkan_devices()
    except OSError as error:
        if VULKAN_ALONE:
            return Found(version, f"{error}; {_LOADER}")
    if os.environ.get(SOFTWARE) != "1":
        devices = [device for device in devices if device.kind != "software"]
    if VULKAN_ALONE and not devices:
        return Found(version, f"Vulkan finds no GPU; {_LOADER}", absent=True)
    return Found(version, devices=devices)


if __name__ == "__main__":
    print(json.dumps(asdict(_look_here())))
