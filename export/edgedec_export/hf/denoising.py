"""What the configuration of a diffusion language model says: its blocks, and whether rows are shifted.

Model types are those of Dream (arXiv:2508.15487), Fast-dLLM v2 (arXiv:2509.26328), SDAR (arXiv:2510.06303) and of the
models that github.com/ZHZisZZ/dllm makes of others ("a2d-...").
"""

from dataclasses import dataclass

from edgedec_export.gguf_writer import Entry, boolean, whole_number
from edgedec_runtimes.weights.config_values import ConfigValues

_SHIFTED = {"Dream": True, "Fast_dLLM_Qwen": True, "sdar": False, "a2d-qwen2": False, "a2d-qwen3": False}
_BLOCK_KEYS = {"Fast_dLLM_Qwen": "bd_size", "sdar": "block_size"}


@dataclass(frozen=True, slots=True)
class Denoising:
    """A diffusion language model.

    Attributes:
        block: How many positions see each other; None where all do.
        shift: Whether a row says what stands behind it.
    """

    block: int | None
    shift: bool

    def entries(self, architecture: str) -> list[Entry]:
        """Return the metadata entries of a GGUF. The key of blocks is edgedec's own; the other keys are llama.cpp's."""
        found = [("diffusion.shift_logits", boolean(self.shift))]
        if self.block is None:
            return [*found, (f"{architecture}.attention.causal", boolean(False))]
        return [*found, ("diffusion.block_size", whole_number(self.block))]


def read_denoising(values: ConfigValues) -> Denoising | None:
    """Return what makes a model a diffusion language model; None for another one (raises where no block is named)."""
    kind = values.values["model_type"]
    if kind not in _SHIFTED:
        return None
    key = _BLOCK_KEYS.get(kind)
    return Denoising(values.whole(key) if key is not None else None, _SHIFTED[kind])
