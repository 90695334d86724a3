"""Execution providers of ONNX Runtime by the names that users know, and why one is not taken.

A provider is built into the installed onnxruntime (CUDA in onnxruntime-gpu, CoreML in macOS wheels) or comes as a
plug-in library in a package of its own, which is registered with the process when it is first asked for.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgedec.errors import RuntimeUnavailableError

CPU = "cpu"
AUTO = "auto"
_AUTO_ORDER = ("cuda", "openvino")  # those with kernels for what exports are made of


@dataclass(frozen=True, slots=True)
class Provider:
    """A line of the table of providers.

    Attributes:
        device: What users call it.
        name: What ONNX Runtime calls it.
        package: What to install for it.
        plug_in: Module of the package that has `get_library_path()`, where it is a plug-in.
    """

    device: str
    name: str
    package: str
    plug_in: str | None = None


PROVIDERS = {
    provider.device: provider
    for provider in (
        Provider(CPU, "CPUExecutionProvider", "onnxruntime"),
        Provider("cuda", "CUDAExecutionProvider", "onnxruntime-gpu"),
        Provider("coreml", "CoreMLExecutionProvider", "onnxruntime (on macOS)"),
        Provider("openvino", "OpenVINOExecutionProvider", "onnxruntime-ep-openvino", "onnxruntime_ep_openvino"),
        Provider("qnn", "QNNExecutionProvider", "onnxruntime-qnn", "onnxruntime_qnn"),
    )
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The provider to open a graph with.

    Attributes:
        provider: Which.
        devices: ONNX Runtime's devices of a plug-in; empty for one that is built in.
    """

    provider: Provider
    devices: tuple[Any, ...] = ()


def choose_provider(ort: Any, device: str | None) -> Chosen:
    """Return the provider for a device's name; None is the CPU, "auto" the first that works here, the CPU at last.

    Args:
        ort: The module onnxruntime.
        device: A name of PROVIDERS or ONNX Runtime's own, in any case.

    Raises:
        RuntimeUnavailableError: There is no such provider, or it does not work here, and why.
    """
    wanted = (device or CPU).lower()
    if wanted == AUTO:
        for name in _AUTO_ORDER:
            found = _try(ort, PROVIDERS[name])
            if isinstance(found, Chosen):
                return found
        return Chosen(PROVIDERS[CPU])
    provider = next((p for p in PROVIDERS.values() if wanted in (p.device, p.name.lower())), None)
    if provider is None:
        raise RuntimeUnavailableError(
            f"the onnx runtime knows no device {device!r}; it knows {', '.join(PROVIDERS)} and {AUTO}"
        )
    found = _try(ort, provider)
    if isinstance(found, str):
        raise RuntimeUnavailableError(f"the device {device!r} can't be used: {found}")
    return found


def devices(ort: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of devices that work here, and of each other one why it does not."""
    works, refusals = [], []
    for provider in PROVIDERS.values():
        found = _try(ort, provider)
        if isinstance(found, Chosen):
            works.append(provider.device)
        else:
            refusals.append(f"{provider.device}: {found}")
    return tuple(works), tuple(refusals)


def _try(ort: Any, provider: Provider) -> Chosen | str:
    """Return how to use a provider, or why it can't be."""
    found = () if provider.plug_in is None else tuple(_plugged_in(ort, provider))
    if found or provider.name in ort.get_available_providers():
        return Chosen(provider, found)
    if provider.plug_in is None:
        return f"the installed onnxruntime has no {provider.name}; it comes with the package {provider.package}"
    try:
        module = importlib.import_module(provider.plug_in)
        library = module.get_library_path()
    except Exception as error:  # a broken package raises whatever its parts raise
        return f"{provider.package} can't be imported ({error}); pip install {provider.package}"
    try:
        ort.register_execution_provider_library(provider.name, library)
    except Exception as error:
        return f"{provider.package} does not load into onnxruntime {ort.__version__} ({error})"
    found = tuple(_plugged_in(ort, provider))
    return Chosen(provider, found) if found else f"{provider.package} finds no device that it runs on"


def _plugged_in(ort: Any, provider: Provider) -> Iterator[Any]:
    """Yield the first device of a plug-in that is registered."""
    for device in ort.get_ep_devices():
        if device.ep_name == provider.name:
            yield device
            return
