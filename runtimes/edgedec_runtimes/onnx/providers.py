"""Finds the execution provider of ONNX Runtime for a device's name, or says why it can't be used.

A provider is built into the installed onnxruntime (CUDA in onnxruntime-gpu, CoreML in macOS wheels), or comes as a
plug-in library in a package of its own, which is registered when the provider is first needed.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgedec.errors import RuntimeUnavailableError

CPU = "cpu"
AUTO = "auto"
_AUTO_ORDER = ("cuda", "openvino")  # the providers that have kernels for the operators of exports


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider.

    Attributes:
        device: The name that users give.
        name: ONNX Runtime's name.
        package: The package that brings the provider.
        plug_in: The module of that package with `get_library_path()`; None for a provider that is built in.
        memory: ONNX Runtime's name of the memory that keys and values lie in; None for that of the process.
    """

    device: str
    name: str
    package: str
    plug_in: str | None = None
    memory: str | None = None


PROVIDERS = {
    provider.device: provider
    for provider in (
        Provider(CPU, "CPUExecutionProvider", "onnxruntime"),
        Provider("cuda", "CUDAExecutionProvider", "onnxruntime-gpu"),
        Provider("coreml", "CoreMLExecutionProvider", "onnxruntime (on macOS)"),
        Provider("openvino", "OpenVINOExecutionProvider", "onnxruntime-ep-openvino", "onnxruntime_ep_openvino"),
        Provider("webgpu", "WebGpuExecutionProvider", "onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu", "webgpu"),
        Provider("qnn", "QNNExecutionProvider", "onnxruntime-qnn", "onnxruntime_qnn"),
    )
}


@dataclass(frozen=True, slots=True)
class ChosenProvider:
    """The provider to open a graph with.

    Attributes:
        devices: ONNX Runtime's devices of a plug-in; empty for a provider that is built in.
    """

    provider: Provider
    devices: tuple[Any, ...] = ()


def choose_provider(ort: Any, device: str | None) -> ChosenProvider:
    """Return the provider for a device's name.

    Args:
        ort: The module onnxruntime.
        device: A key of PROVIDERS or ONNX Runtime's own name, in any case; "auto" for the first provider that works
            here, or else the CPU; None for the CPU.

    Raises:
        RuntimeUnavailableError: There is no such provider, or it does not work here; the message says why.
    """
    device_name = (device or CPU).lower()
    if device_name == AUTO:
        for name in _AUTO_ORDER:
            chosen = _try(ort, PROVIDERS[name])
            if isinstance(chosen, ChosenProvider):
                return chosen
        return ChosenProvider(PROVIDERS[CPU])
    provider = next((p for p in PROVIDERS.values() if device_name in (p.device, p.name.lower())), None)
    if provider is None:
        raise RuntimeUnavailableError(
            f"the onnx runtime knows no device {device!r}; it knows {', '.join(PROVIDERS)} and {AUTO}"
        )
    chosen = _try(ort, provider)
    if isinstance(chosen, str):
        raise RuntimeUnavailableError(f"the device {device!r} can't be used: {chosen}")
    return chosen


def devices(ort: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the devices that work here, and for each other device why it does not."""
    works, refusals = [], []
    for provider in PROVIDERS.values():
        chosen = _try(ort, provider)
        if isinstance(chosen, ChosenProvider):
            works.append(provider.device)
        else:
            refusals.append(f"{provider.device}: {chosen}")
    return tuple(works), tuple(refusals)


def _try(ort: Any, provider: Provider) -> ChosenProvider | str:
    """Return how to use a provider, or why it can't be used."""
    plugged_in = () if provider.plug_in is None else tuple(_plugged_in(ort, provider))
    if plugged_in or provider.name in ort.get_available_providers():
        return ChosenProvider(provider, plugged_in)
    if provider.plug_in is None:
        return f"the installed onnxruntime has no {provider.name}; it comes with the package {provider.package}"
    try:
        module = importlib.import_module(provider.plug_in)
        library = module.get_library_path()
    except Exception as error:  # a broken package may raise anything
        return f"{provider.package} can't be imported ({error}); pip install {provider.package}"
    try:
        ort.register_execution_provider_library(provider.name, library)
    except Exception as error:
        return f"{provider.package} does not load into onnxruntime {ort.__version__} ({error})"
    plugged_in = tuple(_plugged_in(ort, provider))
    return ChosenProvider(provider, plugged_in) if plugged_in else f"{provider.package} finds no device that it runs on"


def _plugged_in(ort: Any, provider: Provider) -> Iterator[Any]:
    """Yield the first device of a plug-in, if the plug-in is registered and has one."""
    for device in ort.get_ep_devices():
        if device.ep_name == provider.name:
            yield device
            return
