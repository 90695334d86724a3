"""Opens an NPU's graph in ONNX Runtime, once for each number of rows and context that forwards need.

The NPU (QNN's HTP back end; on x86-64 its emulator) must take every node: a node that would fall back to the CPU is an
error. On the device "cpu" the same graph runs on ONNX Runtime's CPU provider, which is slow and meant for tests. The
devices "openvino", "openvino-gpu" and "openvino-npu" run it on Intel's processors, GPUs and NPUs; OpenVINO leaves some
nodes to the CPU provider.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgedec.errors import OptionError, RuntimeUnavailableError
from edgedec.gguf.file import GRAPH
from edgedec.plugins import installed_version
from edgedec.processor import machine_name
from edgedec_runtimes.npu.compiled import open_kept
from edgedec_runtimes.npu.facts import Facts
from edgedec_runtimes.npu.inputs import Arrays
from edgedec_runtimes.onnx.library import session_options, translated
from edgedec_runtimes.onnx.providers import choose_provider

NPU, CPU, OPENVINO = "npu", "cpu", "openvino"
_OPENVINO_DEVICES = {OPENVINO: "CPU", f"{OPENVINO}-gpu": "GPU", f"{OPENVINO}-npu": "NPU"}
_NAMES = {None: NPU, "npu": NPU, "qnn": NPU, "qnnexecutionprovider": NPU, "cpu": CPU, "cpuexecutionprovider": CPU}
_NAMES |= {name: name for name in _OPENVINO_DEVICES}
_OPTIONS = {"backend_type": "htp"}
_CPU_PROVIDER = "CPUExecutionProvider"
_FELL_BACK = "fallback to CPU EP has been explicitly disabled"


def device_of(name: str | None) -> str:
    """Return "npu", "cpu" or one of OpenVINO's for the name that a user gave (RequestError for any other name)."""
    device = _NAMES.get(name.lower() if name is not None else None)
    if device is None:
        others = ", ".join(map(repr, _OPENVINO_DEVICES))
        raise OptionError(
            "device", name, f"the npu runtime takes {NPU!r}, {others}, and {CPU!r} to try an export without one"
        )
    return device


@dataclass(slots=True)
class Graphs:
    """ONNX Runtime's sessions for the graph of one export.

    Attributes:
        ort: The module onnxruntime.
        folder: The folder of the export.
        facts: The sizes of the graph.
        device: "npu", "cpu", "openvino", "openvino-gpu" or "openvino-npu".
        n_threads: Threads of a run on the CPU.
        compiled: The folder that compiled graphs are kept in, or None.
    """

    ort: Any
    folder: Path
    facts: Facts
    device: str
    n_threads: int
    compiled: Path | None = None
    _open: dict[tuple[int, int], Any] = field(default_factory=dict)

    def run(self, n_rows: int, context: int, inputs: Arrays, outputs: list[str]) -> list[Any]:
        """Run the graph on `inputs` and return the named outputs, quantized.

        Raises:
            RuntimeUnavailableError: The NPU is not there, or does not take the whole graph.
            ModelFormatError, UnsupportedModelError, MemoryCapError: The graph can't be opened or run.
        """
        session = self.session(n_rows, context)
        with translated("a forward"):
            outputs_read: list[Any] = session.run(outputs, inputs)
        return outputs_read

    def session(self, n_rows: int, context: int) -> Any:
        """Return ONNX Runtime's session for n_rows rows and a context, opened at its first use (raises as `run`)."""
        key = n_rows, context
        if key not in self._open:
            self._open[key] = self._made(n_rows, context)
        return self._open[key]

    def close(self) -> None:
        """Free all sessions."""
        self._open.clear()

    def _made(self, n_rows: int, context: int) -> Any:
        if self.device == CPU:
            return self._opened(self.folder / GRAPH, self._options(n_rows, context), [_CPU_PROVIDER])
        if self.device in _OPENVINO_DEVICES:
            return self._on_openvino(n_rows, context)

        def open_graph(compiled: Path | None, entries: dict[str, str]) -> Any:
            options = self._options(n_rows, context)
            options.add_provider_for_devices(npu_devices(self.ort), _OPTIONS)
            for key, value in (entries | {"session.disable_cpu_ep_fallback": "1"}).items():
                options.add_session_config_entry(key, value)
            return self._opened(compiled or self.folder / GRAPH, options, None)

        return open_kept(self.compiled and self.compiled / f"{n_rows}x{context}", open_graph)

    def _on_openvino(self, n_rows: int, context: int) -> Any:
        """Open the graph on a device of OpenVINO, by its plug-in where that is installed."""
        chosen, options = choose_provider(self.ort, OPENVINO), self._options(n_rows, context)
        device = _OPENVINO_DEVICES[self.device]
        if not chosen.devices:
            settings = {"device_type": device, "num_of_threads": str(self.n_threads)}
            self.ort.set_default_logger_severity(3)  # it warns of every weight that it has folded
            try:
                return self._opened(self.folder / GRAPH, options, [(chosen.provider.name, settings), _CPU_PROVIDER])
            finally:
                self.ort.set_default_logger_severity(2)
        devices = [d for d in self.ort.get_ep_devices() if d.ep_name == chosen.provider.name]
        of_type = [d for d in devices if d.device.type.name == device]
        if not of_type:
            raise RuntimeUnavailableError(
                f"OpenVINO finds no {device} on this machine; it finds {', '.join(d.device.type.name for d in devices)}"
            )
        options.add_provider_for_devices(of_type[:1], {})
        return self._opened(self.folder / GRAPH, options, None)

    def _options(self, n_rows: int, context: int) -> Any:
        options = session_options(self.ort, self.n_threads)
        for name, size in self.facts.dimensions(n_rows, context).items():
            options.add_free_dimension_override_by_name(name, size)
        return options

    def _opened(self, path: Path, options: Any, providers: list[Any] | None) -> Any:
        with translated(f"{path}: it can't be opened"):
            try:
                return self.ort.InferenceSession(
                    path, options, providers=providers, enable_fallback=0, read_config_from_model=0
                )
            except Exception as error:
                if _FELL_BACK not in str(error):
                    raise
                raise RuntimeUnavailableError(
                    f"{path}: the NPU does not take every operator of the graph; update onnxruntime-qnn, or export the "
                    "model again"
                ) from error


def compiled_folder(cache_dir: Path, facts: Facts, ort: Any) -> Path:
    """Return the folder for the compiled graphs of an export, which differs by machine and by versions."""
    version = installed_version("onnxruntime-qnn") or "unknown"
    key = f"{facts.sha256} {ort.__version__} {version} {machine_name()}"
    return cache_dir / "npu" / hashlib.sha256(key.encode()).hexdigest()[:32]


def npu_devices(ort: Any) -> list[Any]:
    """Return a list with ONNX Runtime's device for the NPU.

    Raises:
        RuntimeUnavailableError: onnxruntime-qnn is missing, or finds no NPU.
    """
    try:
        provider = choose_provider(ort, "qnn").provider
    except RuntimeUnavailableError as error:
        raise RuntimeUnavailableError(f"{error}; or try the export with --device {CPU}") from error
    devices = [device for device in ort.get_ep_devices() if device.ep_name == provider.name]
    npu = ort.OrtHardwareDeviceType.NPU
    return sorted(devices, key=lambda device: device.device.type != npu)[:1]  # the emulator's device is a CPU
