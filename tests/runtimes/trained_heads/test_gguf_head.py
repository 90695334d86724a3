"""Heads of either kind written as GGUFs are read as what they were; what the format can't express is refused by name.

Files of llama.cpp and ik_llama.cpp are read, or what is wrong with them is named.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.tiny_blocks import CARDS, block_card, shape_of, tiny_block
from support.heads.tiny_heads import TinyHead, head_weights, write_head
from support.models.gguf_writer import Typed, write_gguf
from support.models.tiny_models import tiny_llama

from edgedec.errors import ModelFormatError, RequestError, UnsupportedModelError
from edgedec.gguf.file import ValueType, read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.head_to_gguf import parse_types, write_head_gguf
from edgedec_export.target_rows import read_rows
from edgedec_runtimes.trained_heads.card import HeadCard, Promise
from edgedec_runtimes.trained_heads.gguf_block import tensor_name
from edgedec_runtimes.trained_heads.gguf_eagle3 import TENSORS
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.load import is_head_path, load_head
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text
from edgedec_runtimes.trained_heads.target import target_of

KIND: dict[str, Any] = {"n_embd": 64, "n_embd_target": 64, "n_head": 4, "head_dim": 16, "taps": (1, 2, 3)}
KIND |= {"n_vocab_target": 260}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model with four layers."""
    return tiny_llama(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=4)


def _written(folder: Path, target: Path, tiny: TinyHead, **options: Any) -> tuple[Head, Head]:
    """Return a head, and the same after it was written as a GGUF and read."""
    write_head(folder, tiny)
    source = load_head(folder)
    return source, load_head(write_head_gguf(source, read_gguf(target), folder / "head.gguf", **options))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"norm_before_residual": True},
        {"fc_norm": "joined"},
        {"own_output": True},
        {"own_output": True, "own_embedding": True},
        {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}},
    ],
)
def test_a_head_survives_the_format(tmp_path: Path, target_path: Path, change: dict[str, Any]) -> None:
    """Written in F32, card, tokens and every tensor are the same; q and k are in halves again."""
    source, found = _written(tmp_path, target_path, TinyHead(**KIND | change), types="F32")
    assert found.card == source.card
    assert (found.d2t == source.d2t).all()
    assert found.tensors.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        assert (found.tensors[name].floats() == tensor.floats()).all(), name


def test_q_and_k_are_written_in_pairs_of_neighbours(tmp_path: Path, target_path: Path) -> None:
    """Row 1 of a head in the file is row head_dim / 2 of the checkpoint's, as llama.cpp's converter writes it."""
    source, _ = _written(tmp_path, target_path, TinyHead(**KIND), types="F32")
    raw = read_gguf(tmp_path / "head.gguf").read_tensor_bytes(TENSORS["q"])
    rows = np.frombuffer(raw, np.float32).reshape(64, 128)
    assert (rows[1] == source.tensors["q"].floats()[8]).all()
    assert (rows[17] == source.tensors["q"].floats()[16 + 8]).all()


def test_types_are_chosen_by_tensor(tmp_path: Path, target_path: Path) -> None:
    """Matrices get the type that was asked for, within its rounding; vectors stay F32; d2t is I64."""
    tiny = TinyHead(**KIND | {"own_output": True})
    source, found = _written(tmp_path, target_path, tiny, types="Q4_0,fc=Q8_0,v=F16")
    types = {name: tensor.type.name for name, tensor in found.tensors.items()}
    assert (types["fc"], types["q"], types["v"], types["hidden_norm"]) == ("Q8_0", "Q4_0", "F16", "F32")
    assert read_gguf(tmp_path / "head.gguf").tensors["d2t"].type.name == "I64"
    for name, share in (("fc", 4e-5), ("q", 8e-3), ("v", 1e-6)):
        exact, rounded = source.tensors[name].floats(), found.tensors[name].floats()
        assert np.square(rounded - exact).sum() < share * np.square(exact).sum(), name


def test_borrowed_rows_can_be_copied(tmp_path: Path, target_path: Path) -> None:
    """With own_output the file has the target's rows, bit by bit, and a d2t that llama.cpp takes."""
    _, found = _written(tmp_path, target_path, TinyHead(**KIND), own_output=True)
    target = read_gguf(target_path)
    assert found.card.own_output
    assert (found.tensors["output"].floats() == read_rows(target, "output.weight", found.d2t)).all()
    plain, _ = _written(tmp_path / "plain", target_path, TinyHead(**KIND))
    assert "d2t" not in read_gguf(tmp_path / "plain" / "head.gguf").tensors
    assert not plain.card.own_output


@pytest.mark.parametrize("own_output", [False, True])
def test_a_shorter_list_keeps_its_first_tokens(tmp_path: Path, target_path: Path, own_output: bool) -> None:
    """The rows of an own output matrix are those tokens'; a number beyond the list changes nothing."""
    write_head(tmp_path, TinyHead(**KIND | {"own_output": own_output}))
    head = load_head(tmp_path)
    short = head.shortened(7)
    assert short.card.n_vocab_draft == 7
    assert short.d2t.tolist() == head.d2t[:7].tolist()
    assert head.shortened(len(head.d2t)) is head
    path = write_head_gguf(short, read_gguf(target_path), tmp_path / "h.gguf", types="F32,output=Q4_0", own_output=True)
    found = load_head(path)
    assert found.d2t.tolist() == head.d2t[:7].tolist()
    assert found.tensors["output"].type.name == "Q4_0"
    target = read_gguf(target_path)
    rows = short.tensors["output"].floats() if own_output else read_rows(target, "output.weight", short.d2t)
    assert np.square(found.tensors["output"].floats() - rows).sum() < 8e-3 * np.square(rows).sum()


def test_the_record_goes_along(tmp_path: Path, target_path: Path) -> None:
    """Name, target and promise are in the file, so that the GGUF alone says what it is for."""
    write_head(tmp_path, TinyHead(**KIND))

    named = target_of(read_gguf(target_path))
    (tmp_path / RECORD_FILE).write_text(record_text("mine", named, Promise((0.5,), {"chat": (0.5,)})))
    source = load_head(tmp_path)
    found = load_head(write_head_gguf(source, read_gguf(target_path), tmp_path / "head.gguf"))
    assert (found.card.name, found.card.target, found.card.promise) == ("mine", named, source.card.promise)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"speculators": True, "feeds_back_normed": True}, "feeds the normed state back"),
        ({"fc_norm": "each"}, "a norm for each tap"),
        ({"norms_output": False, "own_output": True}, "no norm before its output"),
        ({"taps": (1, 2)}, "it has 2 taps"),
        ({"n_ff": 48}, "rows of 'down' have 48"),
    ],
)
def test_what_llama_cpp_cannot_read_is_named(
    tmp_path: Path, target_path: Path, change: dict[str, Any], named: str
) -> None:
    """Such a head is not written, and nothing is left behind."""
    write_head(tmp_path, TinyHead(**KIND | change))
    with pytest.raises(UnsupportedModelError, match=named):
        write_head_gguf(load_head(tmp_path), read_gguf(target_path), tmp_path / "head.gguf")
    assert not list(tmp_path.glob("head*"))


@pytest.mark.parametrize("types", ["Q5_9", "Q4_0,fc", "Q4_0,norm=F32", ""])
def test_unknown_types_are_named(types: str) -> None:
    """The message lists what there is."""
    with pytest.raises(RequestError, match="expected"):
        parse_types(types)


def _parts() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metadata and tensors of a sound head as llama.cpp writes it."""
    weights = head_weights(TinyHead(own_output=True))
    metadata: dict[str, Any] = {
        "general.architecture": "eagle3",
        "general.name": "tiny",
        "eagle3.block_count": 1,
        "eagle3.context_length": 64,
        "eagle3.embedding_length": 32,
        "eagle3.feed_forward_length": 64,
        "eagle3.attention.head_count": 4,
        "eagle3.attention.head_count_kv": 2,
        "eagle3.attention.layer_norm_rms_epsilon": 1e-5,
        "eagle3.rope.freq_base": 5000.0,
        "eagle3.rope.dimension_count": 8,
        "eagle3.vocab_size": 264,
        "eagle3.target_layers": Typed(ValueType.ARRAY, [2, 3, 5], ValueType.INT32),
        "eagle3.target_hidden_size": 32,
        "eagle3.norm_before_residual": False,
        "eagle3.norm_before_fc": False,
    }
    tensors: dict[str, Any] = {TENSORS[name]: values for name, values in weights.items() if name != "d2t"}
    return metadata, tensors | {"d2t": weights["d2t"].astype(np.int64)}


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1", "Q5_0"])
def test_numbers_in_blocks_are_finite(kind: str) -> None:
    """A scale that is infinite is found, and one that is large is not."""
    type = GGMLType[kind]
    data = np.zeros((4, 3, type.block_bytes), np.uint8)
    data[2, 1, :2] = np.array([60000], "<f2").view(np.uint8)
    assert HeadTensor((4, 96), type, data.reshape(-1)).is_finite()
    data[2, 1, :2] = np.array([np.inf], "<f2").view(np.uint8)
    assert not HeadTensor((4, 96), type, data.reshape(-1)).is_finite()


def check_refused(
    folder: Path, metadata: dict[str, Any], tensors: dict[str, Any], error: type[Exception], named: str
) -> None:
    """Check that a file of these values is refused with an error that names what is wrong; None leaves a value out."""
    metadata = {key: value for key, value in metadata.items() if value is not None}
    write_gguf(folder / "h.gguf", metadata, {name: value for name, value in tensors.items() if value is not None})
    with pytest.raises(error, match=named):
        load_head(folder / "h.gguf")


def test_a_file_of_another_writer_is_read(tmp_path: Path) -> None:
    """Without a record the card has no target, and its name is general.name."""
    metadata, tensors = _parts()
    write_gguf(tmp_path / "h.gguf", metadata, tensors)
    card = load_head(tmp_path / "h.gguf").card
    assert (card.name, card.taps, card.target, card.n_vocab_draft) == ("tiny", (2, 3, 5), None, 40)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"general.architecture": "llama"}, UnsupportedModelError, "the architecture is 'llama'"),
        ({"eagle3.block_count": 2}, UnsupportedModelError, "block_count"),
        ({"eagle3.logit_scale": 2.0}, UnsupportedModelError, "logit_scale"),
        ({"eagle3.rope.scaling.type": "yarn"}, UnsupportedModelError, "scaling.type"),
        ({"eagle3.rope.dimension_count": 4}, UnsupportedModelError, "rope.dimension_count is 4"),
        ({"eagle3.target_layers": None}, ModelFormatError, "target_layers"),
        ({"eagle3.target_layers": Typed(ValueType.ARRAY, [2, 2, 3], ValueType.INT32)}, ModelFormatError, "different"),
        ({"eagle3.feed_forward_length": 32}, ModelFormatError, "has the shape"),
        ({"eagle3.norm_before_fc": True}, ModelFormatError, "'fc_norm'"),
        ({"eagle3.attention.layer_norm_rms_epsilon": None}, ModelFormatError, "rms_epsilon"),
        ({"eagle3.rope.freq_base": -1.0}, ModelFormatError, "freq_base is -1"),
        ({"edgedec.head": "{"}, ModelFormatError, "no sound JSON"),
    ],
)
def test_wrong_metadata_is_named(tmp_path: Path, change: dict[str, Any], error: type[Exception], named: str) -> None:
    """A key that edgedec does not know, or whose value can't be, is refused."""
    metadata, tensors = _parts()
    check_refused(tmp_path, metadata | change, tensors, error, named)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}, UnsupportedModelError, "attn_q_norm"),
        ({"fc.weight": None}, ModelFormatError, "fc.weight"),
        ({"d2t": None}, ModelFormatError, "no d2t says which"),
        ({"output.weight": None}, ModelFormatError, "no output matrix"),
        ({"d2t": np.arange(39)}, ModelFormatError, r"'output' has the shape \(40, 32\)"),
        ({"d2t": np.arange(40) + 225}, ModelFormatError, "beyond the target's 264"),
        ({"d2t": np.zeros(40, np.int64)}, ModelFormatError, "names a token twice"),
        ({"d2t": np.zeros(40, np.float32)}, ModelFormatError, "expected a vector of I64"),
        ({"fc.weight": np.ones((32, 96), np.int8)}, UnsupportedModelError, "is I8"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: dict[str, Any], error: type[Exception], named: str) -> None:
    """Missing, unknown and contradicting tensors are refused."""
    metadata, tensors = _parts()
    check_refused(tmp_path, metadata, tensors | change, error, named)


SIZES: dict[str, Any] = {"n_embd": 64, "n_embd_target": 64, "head_dim": 16, "n_vocab_target": 260, "taps": (1, 2, 3)}


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
        *("convolutions", "selector", "dflash2"),
    ],
)
def test_a_block_survives_the_format(tmp_path: Path, target_path: Path, name: str) -> None:
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


def integers(*values: int) -> Typed:
    return Typed(ValueType.ARRAY, list(values), ValueType.INT32)


def _block_parts(head: Head) -> tuple[dict[str, Any], dict[str, Any]]:
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
        "dflash.target_layers": integers(*card.taps),
        "tokenizer.ggml.mask_token_id": 3,
    }
    if shape.conv_length:
        metadata |= {"dflash.conv_kernel_size": shape.conv_length, "dflash.conv_group_size": shape.conv_group}
        metadata |= {"dflash.selector_rank": shape.rank, "dflash.selector_top_k": shape.top_k}
    tensors: dict[str, Any] = {tensor_name(name): tensor.floats() for name, tensor in head.tensors.items()}
    if card.own_output:
        tensors["d2t"] = head.d2t.astype(np.int64)
    return metadata, tensors


DSPARK = tiny_block(block_card({"markov": "vanilla", "rank": 6, "confidence": True, "mask_token": 3}, own_output=True))
SELECTING = {"shifted": False, "mask_token": 3, "markov": "selector", "rank": 6, "top_k": 4}
DFLASH2 = tiny_block(block_card(SELECTING | {"conv_length": 2, "conv_group": 16}, own_output=True))
DFLASH = tiny_block(block_card({"shifted": False, "mask_token": 3, "n_layer": 2}, own_output=True))


@pytest.mark.parametrize("head", [DSPARK, DFLASH, DFLASH2], ids=["DSpark", "DFlash", "DFlash2"])
def test_files_of_llama_cpp_are_read(tmp_path: Path, head: Head) -> None:
    """Without sample_from_anchor, rows are shifted beside a Markov head only."""
    write_gguf(tmp_path / "h.gguf", *_block_parts(head))
    found = load_head(tmp_path / "h.gguf")
    assert found.card == replace(head.card, name="tiny")
    assert found.tensors.keys() == head.tensors.keys()


@pytest.mark.parametrize("head", [DSPARK, DFLASH], ids=["DSpark", "DFlash"])
def test_files_of_ik_llama_cpp_are_read(tmp_path: Path, head: Head) -> None:
    """Layers are named by their outputs there, and some keys and tensors by other names."""
    metadata, tensors = _block_parts(head)
    own = {"block_size": "dflash.block_size", "target_layers": "dflash.target_layer_ids"}
    renamed: dict[str, Any] = {}
    for key, value in metadata.items():
        short = key.removeprefix("dflash.")
        renamed[f"dflash-draft.{own.get(short, short)}" if short != key else key] = value
    renamed |= {
        "general.architecture": "dflash-draft",
        "dflash-draft.dflash.target_layer_ids": integers(*(tap - 1 for tap in head.card.taps)),
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


FULL = Typed(ValueType.ARRAY, [False], ValueType.BOOL)


@pytest.mark.parametrize(
    ("change", "block"),
    [
        ({"sample_from_anchor": False}, {"shifted": False}),
        ({"attention.causal": True}, {"causal": True}),
        ({"attention.sliding_window": 8}, {"windows": (7,)}),
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": FULL}, {}),
        ({"logit_scale": 0.5, "final_logit_softcapping": 30.0}, {"logit_scale": 0.5, "softcap": 30.0}),
        ({"embedding_scale": 2.0}, {"embedding_scale": 2.0}),
        ({"final_logit_softcapping": 0.0, "attention.scale": 8**-0.5}, {}),
        ({"rope.dimension_sections": integers(4, 0, 0, 0)}, {}),
    ],
)
def test_settings_of_llama_cpp_are_read(tmp_path: Path, change: dict[str, Any], block: dict[str, Any]) -> None:
    """What a converter writes for one head and not for another changes the card."""
    metadata, tensors = _block_parts(DSPARK)
    write_gguf(tmp_path / "h.gguf", metadata | {f"dflash.{key}": value for key, value in change.items()}, tensors)
    found = load_head(tmp_path / "h.gguf").card
    assert found.block == replace(shape_of(DSPARK.card), **block)
    assert bool(found.notes) == ("windows" in block)


def test_a_tied_output_matrix_is_the_embedding(tmp_path: Path) -> None:
    """llama.cpp scores with token_embd where a file has one, and no output."""
    head = tiny_block(block_card({"mask_token": 3}, n_vocab_draft=264, own_embedding=True))
    write_gguf(tmp_path / "h.gguf", *_block_parts(head))
    found = load_head(tmp_path / "h.gguf")
    assert (found.card.own_embedding, found.card.own_output) == (True, True)
    assert found.tensors["output"] is found.tensors["embedding"]


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"dflash.conv_kernel_size": 2}, ModelFormatError, "groups of 0, expected a divisor"),
        ({"dflash.selector_top_k": 4}, ModelFormatError, "its selector scores 4 tokens"),
        ({"dflash.hyper_connection_count": 4}, UnsupportedModelError, "DeepSeek-V4's form"),
        ({"dflash.dflash.laguna": True}, UnsupportedModelError, "Laguna's form"),
        ({"dflash.attention.scale": 1.0}, UnsupportedModelError, "attention.scale is 1"),
        ({"dflash.attention.value_scale": 0.5}, UnsupportedModelError, "value_scale is 0.5"),
        ({"dflash.hidden_act": "gelu"}, UnsupportedModelError, "hidden_act is 'gelu'"),
        ({"dflash.rope.dimension_count": 4}, UnsupportedModelError, "rope.dimension_count is 4"),
        ({"dflash.rope.scaling.type": "yarn"}, UnsupportedModelError, "scaling.type"),
        ({"dflash.rope.dimension_sections": integers(2, 2, 0, 0)}, UnsupportedModelError, "dimension_sections"),
        ({"dflash.dflash.backbone_rotary_base": 1e6}, UnsupportedModelError, "backbone_rotary_base"),
        ({"dflash.expert_count": 8}, UnsupportedModelError, "expert_count"),
        ({"dflash.attention.sliding_window": 1}, UnsupportedModelError, "sliding_window is 1"),
        ({"dflash.block_size": None}, ModelFormatError, "no dflash.block_size"),
        ({"dflash.block_size": 2**20}, ModelFormatError, "block_size"),
        ({"dflash.block_count": 2}, ModelFormatError, "no tensor for 'layers.1.q'"),
        ({"dflash.final_logit_softcapping": -1.0}, ModelFormatError, "final_logit_softcapping is -1"),
        ({"tokenizer.ggml.mask_token_id": None}, ModelFormatError, "no tensor for 'mask'"),
        ({"tokenizer.ggml.mask_token_id": 264}, ModelFormatError, "its mask is token 264"),
        ({"dflash.target_layers": integers(2, 5, 3)}, ModelFormatError, "expected rising"),
        ({"dflash.target_layers": integers(1, 2, 3, 4, 5)}, ModelFormatError, "expected 5 taps"),
        ({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, UnsupportedModelError, "attention sinks"),
        ({"blk.0.layer_output_scale": np.ones(1, np.float32)}, UnsupportedModelError, "Gemma 4's form"),
        ({"selector_hidden.weight": np.ones((6, 32), np.float32)}, ModelFormatError, "settings do not use"),
        ({"selector_predecessor.weight": np.ones(6, np.float32)}, ModelFormatError, "is no matrix"),
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
def test_wrong_metadata_and_tensors_of_a_block_are_named(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], named: str
) -> None:
    """A key that edgedec does not know, or whose value can't be, is refused; so are tensors."""
    metadata, tensors = _block_parts(DSPARK)
    (metadata if min(change).startswith(("dflash.", "tokenizer.")) else tensors).update(change)
    check_refused(tmp_path, metadata, tensors, error, named)
