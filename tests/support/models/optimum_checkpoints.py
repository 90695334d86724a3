"""Configuration and tokenizer of Hugging Face checkpoints that the packages tokenizers and transformers can load."""

import json
from pathlib import Path
from typing import Any

from support.models.hf_checkpoints import BEGIN, END, N_VOCAB, TOOL, byte_level_tokenizer

N_CTX = 512


def write_config(folder: Path, model_type: str, **config: Any) -> None:
    """Write config.json and the tokenizer's files into a new folder; `config` overrides keys of config.json."""
    folder.mkdir(exist_ok=True)
    sizes = {"vocab_size": N_VOCAB, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": N_CTX}
    roles = {"bos_token_id": BEGIN, "eos_token_id": [END, TOOL]}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **roles, **config}))
    (folder / "tokenizer.json").write_text(json.dumps(whole_tokenizer()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"})
    )


def whole_tokenizer() -> dict[str, Any]:
    """Return a byte-level tokenizer.json with every entry that the package tokenizers requires."""
    found = byte_level_tokenizer() | {"version": "1.0", "truncation": None, "padding": None, "decoder": None}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    found["added_tokens"] = [token | flags for token in found["added_tokens"]]
    found["model"]["merges"] = ["h e", "l l", "he ll", "\u0120 w"]
    found["model"] |= {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    found["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    special = {"<|begin|>": {"id": "<|begin|>", "ids": [BEGIN], "tokens": ["<|begin|>"]}}
    found["post_processor"] |= {"pair": pair, "special_tokens": special}
    return found
