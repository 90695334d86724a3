"""Write a head as an EAGLE-3 checkpoint in SafeAILab's dialect: config.json, model.safetensors and edgedec's record."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.storage.whole_file import write_atomically
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_LAYER = "midlayer."
_NAMES = {
    "fc": "fc.weight",
    "output_norm": "norm.weight",
    "input_norm": f"{_LAYER}input_layernorm.weight",
    "hidden_norm": f"{_LAYER}hidden_norm.weight",
    "post_attention_norm": f"{_LAYER}post_attention_layernorm.weight",
    "q": f"{_LAYER}self_attn.q_proj.weight",
    "k": f"{_LAYER}self_attn.k_proj.weight",
    "v": f"{_LAYER}self_attn.v_proj.weight",
    "o": f"{_LAYER}self_attn.o_proj.weight",
    "gate": f"{_LAYER}mlp.gate_proj.weight",
    "up": f"{_LAYER}mlp.up_proj.weight",
    "down": f"{_LAYER}mlp.down_proj.weight",
}
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
        _NAMES[name]: array.astype(np.float16) if array.ndim == 2 else array for name, array in arrays.items()
    }
    tensors["d2t"] = token_ids.astype(np.int64) - np.arange(len(token_ids))
    marked = np.zeros(card.n_vocab_target, np.uint8)
    marked[token_ids] = 1
    tensors["t2d"] = marked
    write_atomically(folder / WEIGHTS, *_safetensors(tensors), sync=True)
    write_atomically(folder / CONFIG, json.dumps(_config(card), indent=1).encode(), sync=True)
    text = record_text(
        card.name,
        card.target,
        card.promise,
        about=about,
        taps=list(card.taps),
        feeds_back_normed=card.feeds_back_normed,
    )
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


def _config(card: HeadCard) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": card.n_embd,
        "target_hidden_size": card.n_embd_target,
        "intermediate_size": card.n_ff,
        "num_attention_heads": card.n_head,
        "num_key_value_heads": card.n_head_kv,
        "head_dim": card.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": card.rms_epsilon,
        "rope_theta": card.rope_base,
        "draft_vocab_size": card.n_vocab_draft,
        "vocab_size": card.n_vocab_target,
        "norm_before_residual": card.norm_before_residual,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(card.taps), "use_aux_hidden_state": True},
    }
