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
    ],
)
def test_files_say_what_the_configuration_says(
    tmp_path: Path, tiny: TinyHF, config: dict[str, Any], architecture: str, facts: dict[str, Any]
) -> None:
    """The mask is the tokenizer's, or that of the configuration; the cpu runtime takes the file."""
    write_checkpoint(tmp_path / "hf", tiny, config)
    tokenizer = tmp_path / "hf" / "tokenizer_config.json"
    if "mask_token_id" not in config:
        tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"mask_token": "<|end|>"}))
    path = convert(tmp_path / "hf", tmp_path / "m.gguf")
    gguf, plain = read_gguf(path), converted(tmp_path / "plain", tiny)
    assert gguf.metadata["general.architecture"] == architecture
    assert methods_of(gguf) == {"diffusion": {"most_rows": 256, **facts}}
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
