"""What the configuration of a diffusion language model says: its mask token, its blocks, and whether rows are shifted.

Model types are those of Dream (arXiv:2508.15487), Fast-dLLM v2 (arXiv:2509.26328), SDAR (arXiv:2510.06303) and of the
models that github.com/ZHZisZZ/dllm makes of others ("a2d-...").
"""

from dataclasses import dataclass

from edgedec_export.gguf_writer import Entry, boolean, whole_number
from edgedec_runtimes.weights.config_values import ConfigValues
from edgedec_runtimes.weights.safetensors import read_json

_SHIFTED = {"Dream": True, "Fast_dLLM_Qwen": True, "sdar": False, "a2d-qwen2": False, "a2d-qwen3": False}
_BLOCK_KEYS = {"Fast_dLLM_Qwen": "bd_size", "sdar": "block_size"}


@dataclass(frozen=True, slots=True)
class Denoising:
    """A diffusion language model.

    Attributes:
        mask: The token that stands for a masked position.
        block: How many positions see each other; None where all do.
        shift: Whether a row says what stands behind it.
    """

    mask: int
    block: int | None
    shift: bool

    def entries(self, architecture: str) -> list[Entry]:
        """Return the metadata entries of a GGUF; the one of blocks is edgedec's own, the others are llama.cpp's."""
        found = [
            ("tokenizer.ggml.mask_token_id", whole_number(self.mask)),
            ("diffusion.shift_logits", boolean(self.shift)),
        ]
        if self.block is None:
            return [*found, (f"{architecture}.attention.causal", boolean(False))]
        return [*found, ("diffusion.block_size", whole_number(self.block))]


def read_denoising(values: ConfigValues) -> Denoising | None:
    """Return what makes a model a diffusion language model; None for another one.

    Raises:
        ModelFormatError: The block or the mask token is not named.
    """
    kind = values.values["model_type"]
    if kind not in _SHIFTED:
        return None
    key = _BLOCK_KEYS.get(kind)
    block = values.whole(key) if key is not None else None
    mask = values.values.get("mask_token_id")
    return Denoising(_mask_of_tokenizer(values) if type(mask) is not int else mask, block, _SHIFTED[kind])


def _mask_of_tokenizer(values: ConfigValues) -> int:
    """Return the id of the tokenizer's mask token."""
    folder = values.path.parent
    config, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    named = read_json(config).get("mask_token") if config.exists() else None
    content = named.get("content") if isinstance(named, dict) else named
    added = read_json(tokenizer).get("added_tokens") if tokenizer.exists() else None
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int and content == token.get("content"):
            return int(token["id"])
    return values.fail("neither mask_token_id nor a mask_token of the tokenizer says which token is the mask")
