"""Write a head as a checkpoint: config.json, model.safetensors and edgedec's record.

EAGLE-3 heads are written in SafeAILab's dialect. Block heads are written in DeepSpec's, with the maps between the
vocabularies as speculators writes them, and `mask`, the vector of masked rows, which DeepSpec has no tensor for.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.storage.whole_file import write_atomically
from edgedec_runtimes.trained_heads.block_checkpoint import IN_LAYER, OUTER
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard
from edgedec_runtimes.trained_heads.checkpoint_tensors import LAYER
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_IN_LAYER = LAYER | {"hidden_norm.weight": "hidden_norm"}
_NAMES = {"fc": "fc.weight", "output_norm": "norm.weight"}
_NAMES |= {ours: f"midlayer.{theirs}" for theirs, ours in _IN_LAYER.items()}
_BLOCK_NAMES = {ours: theirs for theirs, ours in OUTER.items()}
_NAMES_IN_LAYER = {ours: theirs for theirs, ours in IN_LAYER.items()}
_DTYPES = {"float16": "F16", "float32": "F32", "int64": "I64", "uint8": "BOOL"}


def write_head(
    folder: Path,
    card: HeadCard,
    arrays: dict[str, NDArray[np.float32]],
    token_ids: NDArray[np.int32],
    about: dict[str, Any],
) -> None:
    """Write a head into a folder, which is made where need be; the record comes last, and files there are replaced.

    Args:
        folder: The folder.
        card: The head's shape, target and promise.
        arrays: float32 arrays by the names of edgedec_runtimes.trained_heads.head; matrices are written as float16.
        token_ids: int32[n_vocab_draft], the tokens that it can draft, the most frequent first.
        about: The recipe and the report, for whoever reads the record.

    Raises:
        OSError: The folder or a file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, NDArray[Any]] = {
        _name(name, card): array.astype(np.float16) if array.ndim == 2 else array for name, array in arrays.items()
    }
    tensors["d2t"] = token_ids.astype(np.int64) - np.arange(len(token_ids))
    marked = np.zeros(card.n_vocab_target, np.uint8)
    marked[token_ids] = 1
    tensors["t2d"] = marked
    write_atomically(folder / WEIGHTS, *_safetensors(tensors), sync=True)
    write_atomically(folder / CONFIG, json.dumps(_config(card), indent=1).encode(), sync=True)
    settings = {"feeds_back_normed": card.feeds_back_normed} if card.block is None else {}
    text = record_text(card.name, card.target, card.promise, about=about, taps=list(card.taps), **settings)
    write_atomically(folder / RECORD_FILE, text.encode(), sync=True)


def _safetensors(tensors: dict[str, NDArray[Any]]) -> list[bytes]:
    """Return the pieces of a safetensors file (github.com/huggingface/safetensors)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces, at = [], 0
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        offsets = [at, at + len(data)]
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        pieces.append(data)
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *pieces]


def _name(name: str, card: HeadCard) -> str:
    """Return what a checkpoint calls a tensor."""
    if card.block is None:
        return _NAMES[name]
    layer, _, inner = name.rpartition(".")
    return f"{layer}.{_NAMES_IN_LAYER[inner]}" if layer else _BLOCK_NAMES[name]


def _config(card: HeadCard) -> dict[str, Any]:
    sizes = {
        "hidden_act": "silu",
        "hidden_size": card.n_embd,
        "target_hidden_size": card.n_embd_target,
        "intermediate_size": card.n_ff,
        "num_attention_heads": card.n_head,
        "num_key_value_heads": card.n_head_kv,
        "head_dim": card.head_dim,
        "rms_norm_eps": card.rms_epsilon,
        "rope_theta": card.rope_base,
        "draft_vocab_size": card.n_vocab_draft,
        "vocab_size": card.n_vocab_target,
        "tie_word_embeddings": False,
    }
    return sizes | (_eagle_config(card) if card.block is None else _block_config(card, card.block))


def _eagle_config(card: HeadCard) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "norm_before_residual": card.norm_before_residual,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(card.taps), "use_aux_hidden_state": True},
    }


def _block_config(card: HeadCard, block: BlockShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": block.n_layer,
        "block_size": block.size,
        "sample_from_anchor": block.shifted,
        "is_causal": block.causal,
        "target_layer_ids": [tap - 1 for tap in card.taps],  # the layers that the taps leave
        "markov_rank": block.rank,
        "markov_head_type": block.markov,
        "enable_confidence_head": block.confidence,
    }
