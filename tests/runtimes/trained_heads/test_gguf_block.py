"""Block heads written as GGUFs are read as what they were; files of llama.cpp and ik_llama.cpp are read, or named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.tiny_blocks import CARDS, block_card, shape_of, tiny_block
from support.models.gguf_writer import Typed, write_gguf
from support.models.tiny_models import tiny_llama

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import ValueType, read_gguf
from edgedec_export.head_to_gguf import write_head_gguf
from edgedec_export.target_rows import read_rows
from edgedec_runtimes.trained_heads.card import HeadCard, Promise
from edgedec_runtimes.trained_heads.gguf_block import tensor_name
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.load import is_head_path, load_head
from edgedec_runtimes.trained_heads.target import target_of

SIZES: dict[str, Any] = {"n_embd": 64, "n_embd_target": 64, "head_dim": 16, "n_vocab_target": 260, "taps": (1, 2, 3)}
OWN = {"own_embedding": True, "own_output": True}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model with four layers."""
    return tiny_llama(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=4)


def _sized(card: HeadCard, **changes: Any) -> HeadCard:
    """Return the card with the sizes of the tiny model."""
    shape = shape_of(card)
    shape = replace(shape, rank=32 if shape.rank else 0)
    changes = {"n_vocab_draft": min(card.n_vocab_draft, 260)} | SIZES | changes
    if card.own_output:
        changes |= {"own_output": True}
    return replace(card, block=shape, **changes)


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "unshifted", "causal", "two layers", "vanilla, unshifted", "gated", "rnn", "confidence"),
        *("confidence alone", "windows", "one row", "full vocabulary", "own output", "mask token", "scales"),
    ],
)
def test_a_head_survives_the_format(tmp_path: Path, target_path: Path, name: str) -> None:
    """Written in F32, card, tokens and every tensor are the same."""
    source = tiny_block(_sized(CARDS[name]))
    found = load_head(write_head_gguf(source, read_gguf(target_path), tmp_path / "head.gguf", types="F32"))
    assert is_head_path(tmp_path / "head.gguf")
    assert replace(found.card, notes=()) == source.card
    assert (found.d2t == source.d2t).all()
    assert found.tensors.keys() == source.tensors.keys()
    for tensor, values in source.tensors.items():
        assert (found.tensors[tensor].floats() == values.floats()).all(), tensor


def test_types_and_record_go_along(tmp_path: Path, target_path: Path) -> None:
    """Matrices get the type that was asked for in all layers; confidence and vectors stay F32; rows can be copied."""
    target = read_gguf(target_path)
    card = _sized(CARDS["confidence"], target=target_of(target), promise=Promise((0.5,), {"chat": (0.5,)}))
    source = tiny_block(replace(card, name="mine", block=replace(shape_of(card), n_layer=2)))
    types = "Q4_0,fc=Q8_0,v=F16,markov_w1=Q8_0"
    found = load_head(write_head_gguf(source, target, tmp_path / "head.gguf", types=types, own_output=True))
    kinds = {name: tensor.type.name for name, tensor in found.tensors.items()}
    assert {kinds["fc"], kinds["markov_w1"]} == {"Q8_0"}
    assert {kinds["layers.0.q"], kinds["layers.1.down"], kinds["markov_w2"]} == {"Q4_0"}
    assert {kinds["layers.1.v"], kinds["layers.0.v"]} == {"F16"}
    assert {kinds["confidence"], kinds["mask"], kinds["layers.1.q_norm"]} == {"F32"}
    assert (found.tensors["output"].floats() == read_rows(target, "output.weight", found.d2t)).all()
    assert (found.card.name, found.card.target, found.card.promise) == ("mine", card.target, card.promise)


@pytest.mark.parametrize(
    ("card", "named"),
    [
        (block_card(**SIZES, own_embedding=True), "--own-output adds one"),
        (block_card({"n_layer": 2, "windows": (3, 4)}, **SIZES), "windows of several sizes"),
        (block_card({"markov": "vanilla", "rank": 6}, **SIZES), "rows of 'markov_w1' have 6 numbers"),
    ],
)
def test_what_is_not_written_is_named(tmp_path: Path, target_path: Path, card: HeadCard, named: str) -> None:
    """Such a head is not written, and nothing is left behind."""
    with pytest.raises(UnsupportedModelError, match=named):
        write_head_gguf(tiny_block(card), read_gguf(target_path), tmp_path / "head.gguf")
    assert not list(tmp_path.iterdir())


def _parts(head: Head) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metadata and tensors of a sound head as llama.cpp's converter writes it."""
    card, shape = head.card, shape_of(head.card)
    metadata: dict[str, Any] = {
        "general.architecture": "dflash",
        "general.name": "tiny",
        "dflash.block_count": shape.n_layer,
        "dflash.embedding_length": card.n_embd,
        "dflash.feed_forward_length": card.n_ff,
        "dflash.attention.head_count": card.n_head,
        "dflash.attention.head_count_kv": card.n_head_kv,
        "dflash.attention.key_length": card.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": 1e-5,
        "dflash.rope.freq_base": 5000.0,
        "dflash.block_size": shape.size,
        "dflash.vocab_size": card.n_vocab_target,
        "dflash.target_layers": Typed(ValueType.ARRAY, list(card.taps), ValueType.INT32),
        "tokenizer.ggml.mask_token_id": 3,
    }
    tensors: dict[str, Any] = {tensor_name(name): tensor.floats() for name, tensor in head.tensors.items()}
    if card.own_output:
        tensors["d2t"] = head.d2t.astype(np.int64)
    return metadata, tensors


DSPARK = tiny_block(block_card({"markov": "vanilla", "rank": 6, "confidence": True, "mask_token": 3}, own_output=True))
DFLASH = tiny_block(block_card({"shifted": False, "mask_token": 3, "n_layer": 2}, own_output=True))


@pytest.mark.parametrize("head", [DSPARK, DFLASH], ids=["DSpark", "DFlash"])
def test_files_of_llama_cpp_are_read(tmp_path: Path, head: Head) -> None:
    """Without sample_from_anchor, rows are shifted beside a Markov head only."""
    write_gguf(tmp_path / "h.gguf", *_parts(head))
    found = load_head(tmp_path / "h.gguf")
    assert found.card == replace(head.card, name="tiny")
    assert found.tensors.keys() == head.tensors.keys()


@pytest.mark.parametrize("head", [DSPARK, DFLASH], ids=["DSpark", "DFlash"])
def test_files_of_ik_llama_cpp_are_read(tmp_path: Path, head: Head) -> None:
    """Layers are named by their outputs there, and some keys and tensors by other names."""
    metadata, tensors = _parts(head)
    own = {"block_size": "dflash.block_size", "target_layers": "dflash.target_layer_ids"}
    renamed: dict[str, Any] = {}
    for key, value in metadata.items():
        short = key.removeprefix("dflash.")
        renamed[f"dflash-draft.{own.get(short, short)}" if short != key else key] = value
    outputs = [tap - 1 for tap in head.card.taps]
    renamed |= {
        "general.architecture": "dflash-draft",
        "dflash-draft.dflash.target_layer_ids": Typed(ValueType.ARRAY, outputs, ValueType.INT32),
        "dflash-draft.dflash.mask_token_id": 3,
        "dflash-draft.dflash.n_target_features": 96,
        "dflash-draft.rope.dimension_count": 8,
    }
    del renamed["tokenizer.ggml.mask_token_id"]
    names = {"fc.weight": "dflash_fc.weight", "enc.output_norm.weight": "dflash_hidden_norm.weight"}
    names |= {f"blk.{i}.ffn_norm.weight": f"blk.{i}.post_attention_norm.weight" for i in range(2)}
    write_gguf(tmp_path / "h.gguf", renamed, {names.get(name, name): values for name, values in tensors.items()})
    found = load_head(tmp_path / "h.gguf")
    assert found.card == replace(head.card, name="tiny")
    assert (found.tensors["fc"].floats() == head.tensors["fc"].floats()).all()


@pytest.mark.parametrize(
    ("change", "block"),
    [
        ({"dflash.sample_from_anchor": False}, {"shifted": False}),
        ({"dflash.attention.causal": True}, {"causal": True}),
        ({"dflash.attention.sliding_window": 8}, {"windows": (7,)}),
        (
            {
                "dflash.attention.sliding_window": 8,
                "dflash.attention.sliding_window_pattern": Typed(ValueType.ARRAY, [False], ValueType.BOOL),
            },
            {},
        ),
        ({"dflash.logit_scale": 0.5, "dflash.final_logit_softcapping": 30.0}, {"logit_scale": 0.5, "softcap": 30.0}),
        ({"dflash.embedding_scale": 2.0}, {"embedding_scale": 2.0}),
        ({"dflash.final_logit_softcapping": 0.0, "dflash.attention.scale": 8**-0.5}, {}),
        ({"dflash.rope.dimension_sections": Typed(ValueType.ARRAY, [4, 0, 0, 0], ValueType.INT32)}, {}),
    ],
)
def test_settings_of_llama_cpp_are_read(tmp_path: Path, change: dict[str, Any], block: dict[str, Any]) -> None:
    """What a converter writes for one head and not for another changes the card."""
    metadata, tensors = _parts(DSPARK)
    write_gguf(tmp_path / "h.gguf", metadata | change, tensors)
    found = load_head(tmp_path / "h.gguf").card
    assert found.block == replace(shape_of(DSPARK.card), **block)
    assert bool(found.notes) == ("windows" in block)


def test_a_tied_output_matrix_is_the_embedding(tmp_path: Path) -> None:
    """llama.cpp scores with token_embd where a file has one, and no output."""
    head = tiny_block(block_card({"mask_token": 3}, n_vocab_draft=264, own_embedding=True))
    write_gguf(tmp_path / "h.gguf", *_parts(head))
    found = load_head(tmp_path / "h.gguf")
    assert (found.card.own_embedding, found.card.own_output) == (True, True)
    assert found.tensors["output"] is found.tensors["embedding"]


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"dflash.conv_kernel_size": 2}, UnsupportedModelError, "DFlash2, with convolutions"),
        ({"dflash.hyper_connection_count": 4}, UnsupportedModelError, "DeepSeek-V4's form"),
        ({"dflash.dflash.laguna": True}, UnsupportedModelError, "Laguna's form"),
        ({"dflash.attention.scale": 1.0}, UnsupportedModelError, "attention.scale is 1"),
        ({"dflash.attention.value_scale": 0.5}, UnsupportedModelError, "value_scale is 0.5"),
        ({"dflash.hidden_act": "gelu"}, UnsupportedModelError, "hidden_act is 'gelu'"),
        ({"dflash.rope.dimension_count": 4}, UnsupportedModelError, "rope.dimension_count is 4"),
        ({"dflash.rope.scaling.type": "yarn"}, UnsupportedModelError, "scaling.type"),
        (
            {"dflash.rope.dimension_sections": Typed(ValueType.ARRAY, [2, 2, 0, 0], ValueType.INT32)},
            UnsupportedModelError,
            "dimension_sections",
        ),
        ({"dflash.dflash.backbone_rotary_base": 1e6}, UnsupportedModelError, "backbone_rotary_base"),
        ({"dflash.expert_count": 8}, UnsupportedModelError, "expert_count"),
        ({"dflash.attention.sliding_window": 1}, UnsupportedModelError, "sliding_window is 1"),
        ({"dflash.block_size": None}, ModelFormatError, "no dflash.block_size"),
        ({"dflash.block_size": 2**20}, ModelFormatError, "block_size"),
        ({"dflash.block_count": 2}, ModelFormatError, "no tensor for 'layers.1.q'"),
        ({"dflash.final_logit_softcapping": -1.0}, ModelFormatError, "final_logit_softcapping is -1"),
        ({"tokenizer.ggml.mask_token_id": None}, ModelFormatError, "no tensor for 'mask'"),
        ({"tokenizer.ggml.mask_token_id": 264}, ModelFormatError, "its mask is token 264"),
        (
            {"dflash.target_layers": Typed(ValueType.ARRAY, [2, 5, 3], ValueType.INT32)},
            ModelFormatError,
            "expected rising",
        ),
        (
            {"dflash.target_layers": Typed(ValueType.ARRAY, [1, 2, 3, 4, 5], ValueType.INT32)},
            ModelFormatError,
            "expected 5 taps",
        ),
    ],
)
def test_wrong_metadata_is_named(tmp_path: Path, change: dict[str, Any], error: type[Exception], named: str) -> None:
    """A key that edgedec does not know, or whose value can't be, is refused."""
    metadata, tensors = _parts(DSPARK)
    changed = {key: value for key, value in (metadata | change).items() if value is not None}
    write_gguf(tmp_path / "h.gguf", changed, tensors)
    with pytest.raises(error, match=named):
        load_head(tmp_path / "h.gguf")


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, UnsupportedModelError, "attention sinks"),
        ({"blk.0.layer_output_scale": np.ones(1, np.float32)}, UnsupportedModelError, "Gemma 4's form"),
        ({"selector_hidden.weight": np.ones((6, 32), np.float32)}, UnsupportedModelError, "DFlash2"),
        ({"fc.scale": np.ones(1, np.float32)}, UnsupportedModelError, "fc.scale"),
        ({"fc.weight": None}, ModelFormatError, "no tensor 'fc.weight'"),
        ({"blk.0.attn_v.weight": None}, ModelFormatError, "no tensor for 'layers.0.v'"),
        ({"markov_w2.weight": None}, ModelFormatError, "no tensor for 'markov_w2'"),
        ({"markov_w1.weight": np.ones((40, 6), np.float32)}, ModelFormatError, "'markov_w1' has the shape"),
        ({"markov_w1.weight": np.ones(6, np.float32)}, ModelFormatError, "is no matrix"),
        ({"conf_proj.weight": np.ones((1, 7), np.float32)}, ModelFormatError, "'confidence' has the shape"),
        ({"d2t": None}, ModelFormatError, "no d2t says which"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: dict[str, Any], error: type[Exception], named: str) -> None:
    """Missing, unknown and contradicting tensors are refused."""
    metadata, tensors = _parts(DSPARK)
    changed = {name: values for name, values in (tensors | change).items() if values is not None}
    write_gguf(tmp_path / "h.gguf", metadata, changed)
    with pytest.raises(error, match=named):
        load_head(tmp_path / "h.gguf")
