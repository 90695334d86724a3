"""A GPU for tests: a Vulkan that computes on the CPU, which ONNX Runtime's WebGPU plug-in takes where it is told to."""

import importlib.util
from pathlib import Path

import pytest

from edgedec_export.webgpu import finding

_CHROMIUM = Path(
    "/usr/lib/chromium"
)  # Debian's package brings SwiftShader and a loader; Mesa's of Debian 12 is too old
_DRIVER = _CHROMIUM / "vk_swiftshader_icd.json"


def software_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let processes that are started from now on find the software GPU; skip the test where there is none."""
    if importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
        pytest.skip("onnxruntime-ep-webgpu is not installed: pip install .[gpu]")
    if not _DRIVER.is_file():
        pytest.skip("no Vulkan that computes on the CPU: apt install chromium")
    patch.setenv(finding.SOFTWARE, "1")
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        patch.setenv(name, str(_DRIVER))
    patch.setenv("LD_LIBRARY_PATH", str(_CHROMIUM))
    finding.gpu_report.cache_clear()
