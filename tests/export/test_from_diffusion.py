"""Checkpoints of diffusion language models become GGUFs that say so, with the weights of the model that they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.models.hf_checkpoints import BEGIN, END, TinyHF, write_checkpoint

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec_export.from_hf import convert
from edgedec_export.to_onnx import export_onnx
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.shared.cards import methods_of

QWEN2, QWEN3 = TinyHF("qwen2", biases=True), TinyHF("qwen3", head_dim=32)
LLAMA = TinyHF("llama")
SETTINGS = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "weight_tying": "tie_word_embeddings",
    "max_sequence_length": "max_position_embeddings",
}
TENSORS = {
    "model.embed_tokens.": "model.transformer.wte.",
    "model.norm.": "model.transformer.ln_f.",
    "lm_head.": "model.transformer.ff_out.",
    "input_layernorm.": "attn_norm.",
    "self_attn.o_proj.": "attn_out.",
    "post_attention_layernorm.": "ff_norm.",
    "self_attn.": "",
    "mlp.gate_proj.": "ff_proj.",
    "mlp.up_proj.": "up_proj.",
    "mlp.down_proj.": "ff_out.",
}


def converted(tmp_path: Path, tiny: TinyHF, **config: Any) -> GGUF:
    """Return the GGUF of a checkpoint with these settings."""
    write_checkpoint(tmp_path / "hf", tiny, config)
    return read_gguf(convert(tmp_path / "hf", tmp_path / "m.gguf", force=True))


@pytest.mark.parametrize(
    ("tiny", "config", "architecture", "facts"),
    [
        (QWEN2, {"model_type": "Dream", "mask_token_id": 7}, "dream", {"mask": 7, "shift": True}),
        (QWEN2, {"model_type": "Fast_dLLM_Qwen", "bd_size": 32}, "qwen2", {"mask": END, "block": 32, "shift": True}),
        (QWEN3, {"model_type": "sdar", "block_size": 4}, "qwen3", {"mask": END, "block": 4, "shift": False}),
        (QWEN3, {"model_type": "a2d-qwen3", "mask_token_id": 9}, "qwen3", {"mask": 9, "shift": False}),
        (QWEN2, {"model_type": "a2d-qwen2", "block_size": 8, "mask_token_id": 9}, "qwen2", {"mask": 9, "block": 8}),
        (QWEN2, {"model_type": "wedlm"}, "qwen2", {"mask": END, "window": 16, "shift": False}),
        (QWEN3, {"model_type": "wedlm", "qk_norm": True}, "qwen3", {"mask": END, "window": 16, "shift": False}),
    ],
)
def test_files_say_what_the_configuration_says(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    tiny: TinyHF,
    config: dict[str, Any],
    architecture: str,
    facts: dict[str, Any],
) -> None:
    """The mask is the tokenizer's, or that of the configuration; the cpu runtime takes the file.

    One warning says where blocks can be named.
    """
    write_checkpoint(tmp_path / "hf", tiny, config)
    tokenizer = tmp_path / "hf" / "tokenizer_config.json"
    if "mask_token_id" not in config:
        tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"mask_token": "<|end|>"}))
    path = convert(tmp_path / "hf", tmp_path / "m.gguf")
    gguf, plain = read_gguf(path), converted(tmp_path / "plain", tiny)
    assert gguf.metadata["general.architecture"] == architecture
    most_rows = 256 if {"block", "window"} & {*facts} else 1024
    rows = {"most_rows": most_rows, "kept_rows": 3 * facts.get("block", facts.get("window", 32))}
    assert methods_of(gguf) == {"diffusion": {"shift": False, **rows, **facts}}
    assert ("block_size" in caplog.text) == (config["model_type"] == "a2d-qwen3")
    assert methods_of(plain) == {}
    assert gguf.tensors.keys() == plain.tensors.keys()
    assert path.read_bytes()[-2000:] == plain.paths[0].read_bytes()[-2000:]
    assert Cpu().accepts(path) is None


def test_no_graph_is_made_of_it(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    gguf = converted(tmp_path, QWEN2, model_type="Fast_dLLM_Qwen", bd_size=32, mask_token_id=7)
    with pytest.raises(UnsupportedModelError, match="diffusion"):
        export_onnx(gguf.paths[0], tmp_path / "onnx")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """No token is the mask, or no number says the block."""
    with pytest.raises(ModelFormatError, match="mask_token"):
        converted(tmp_path, QWEN3, model_type="sdar", block_size=4)
    with pytest.raises(ModelFormatError, match="bd_size"):
        converted(tmp_path, QWEN2, model_type="Fast_dLLM_Qwen", mask_token_id=BEGIN)


def write_llada(folder: Path, **settings: Any) -> Path:
    """Write a checkpoint of LLAMA with the names of a LLaDA; `settings` replace some of it."""
    write_checkpoint(folder, LLAMA)
    config = json.loads((folder / "config.json").read_text())
    given = {theirs: config[usual] for theirs, usual in SETTINGS.items()}
    given |= {"model_type": "llada", "block_type": "llama", "mask_token_id": 7, "vocab_size": config["vocab_size"]}
    given |= {"rope_theta": config["rope_theta"], "rms_norm_eps": config["rms_norm_eps"], **settings}
    (folder / "config.json").write_text(json.dumps(given))
    (path,) = folder.glob("*.safetensors")
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = {as_in_llada(name): value for name, value in json.loads(data[8:end]).items()}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[end:])
    return folder


def as_in_llada(name: str) -> str:
    """Return the name of a tensor in a LLaDA."""
    for usual, theirs in TENSORS.items():
        name = name.replace(usual, theirs)
    return name.replace("model.layers.", "model.transformer.blocks.")


def test_a_llada_is_a_llama_with_other_names(tmp_path: Path) -> None:
    """Its tensors are those of the same llama, in the same order; what a llama lacks is refused by name."""
    gguf = read_gguf(convert(write_llada(tmp_path / "hf"), tmp_path / "m.gguf"))
    plain = converted(tmp_path / "plain", LLAMA)
    assert gguf.metadata["general.architecture"] == "llada"
    assert methods_of(gguf) == {"diffusion": {"most_rows": 1024, "kept_rows": 96, "mask": 7, "shift": False}}
    assert gguf.tensors.keys() == plain.tensors.keys()
    assert all(gguf.read_tensor_bytes(name) == plain.read_tensor_bytes(name) for name in plain.tensors)
    assert Cpu().accepts(tmp_path / "m.gguf") is None
    with pytest.raises(UnsupportedModelError, match="include_bias"):
        convert(write_llada(tmp_path / "other", include_bias=True), tmp_path / "o.gguf")
