"""The npu runtime: models that `edgedec export --target npu` made, on an NPU through ONNX Runtime's QNN provider.

docs/npu.md is the user's side.
"""

from edgedec_runtimes.npu.runtime import Npu

__all__ = ["Npu"]
