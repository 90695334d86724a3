"""Finds the GPU that ONNX Runtime's WebGPU plug-in would use, in a process that a broken driver may end.

python -m edgedec_export.webgpu.finding       # prints what was found, as JSON
"""

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
from edgedec.plugins import install_command
from edgedec_export.webgpu.vulkan import VulkanDevice, vulkan_devices
from edgedec_runtimes.child.process import child_environment
from edgedec_runtimes.llamacpp.trial import ending
from edgedec_runtimes.onnx.library import load_library
from edgedec_runtimes.onnx.providers import PROVIDERS, choose_provider
from edgedec_runtimes.shared.native import VULKAN_ALONE

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
def found() -> Found:
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
        told = json.loads(done.stdout.splitlines()[-1])
        devices = [VulkanDevice(**device) for device in told.pop("devices")]
        return Found(**told, devices=devices)
    how = ending(done.returncode) or f"the process that looked for a GPU ended with status {done.returncode}"
    return Found(refusal=f"the card's driver can't be used: {how}; update the driver")


def require() -> Found:
    """Return what found() returns (RuntimeUnavailableError, with what to install, where no GPU can be used)."""
    told = found()
    if told.refusal:
        kind = RuntimeAbsentError if told.absent else RuntimeUnavailableError
        raise kind(f"no GPU can be used: {told.refusal}")
    return told


def as_device(told: Found) -> Device:
    """Return the GPU for memory plans. One whose memory is unknown is taken to share the host's, as Apple's do."""
    if not told.devices:
        free = available_bytes() or 0
        return Device(NAME, NAME, free, free, unified=True, driver_bytes=_DRIVER_BYTES)
    gpu = told.devices[0]
    unified = gpu.kind != "discrete"
    return Device(NAME, NAME, gpu.total_bytes, gpu.free_bytes, unified, _DRIVER_BYTES, description=gpu.name)


def _look_here() -> Found:
    """Look in this process, which the driver may end."""
    devices: list[VulkanDevice] = []
    ort: Any = None
    try:
        ort = load_library()
        choose_provider(ort, PROVIDER.device)
        version = f"onnxruntime {ort.__version__}, {PROVIDER.package} {_version()}"
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


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(PROVIDER.package)
    except PackageNotFoundError:
        return "of an unknown version"


if __name__ == "__main__":
    print(json.dumps(asdict(_look_here())))
