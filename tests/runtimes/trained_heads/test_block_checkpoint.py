"""Block checkpoints are read in every dialect, and what edgedec does not run is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from support.heads.tiny_blocks import CARDS, Dialect, block_card, block_config, stored_block, tiny_block, write_block
from support.models.hf_checkpoints import safetensors_bytes

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec_runtimes.trained_heads.card import HeadCard, Promise, Target
from edgedec_runtimes.trained_heads.head import to_halves
from edgedec_runtimes.trained_heads.load import is_head_path, load_head
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text

PLAIN = CARDS["plain"]
DSPARK = CARDS["confidence"]
DIALECTS = get_args(Dialect)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_setting_and_tensor_is_read(tmp_path: Path, card: HeadCard) -> None:
    """The card has what config.json says, and the tensors have the numbers that were written."""
    head = tiny_block(card)
    write_block(tmp_path / "tiny block", head)
    found = load_head(tmp_path / "tiny block")
    assert replace(found.card, notes=()) == card
    assert (found.d2t == head.d2t).all()
    assert found.tensors.keys() == head.tensors.keys()
    for name, tensor in head.tensors.items():
        assert (found.tensors[name].floats() == tensor.floats()).all(), name


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["confidence", "gated", "vanilla, unshifted", "unshifted", "mask token"])
def test_every_dialect_says_the_same(tmp_path: Path, dialect: Dialect, name: str) -> None:
    """Layer ids, windows, order of rows and Markov head are written in five ways, and mean one card."""
    write_block(tmp_path / "tiny block", tiny_block(CARDS[name]), dialect)
    assert is_head_path(tmp_path / "tiny block")
    card = load_head(tmp_path / "tiny block").card
    target = Target(name="tiny/target") if dialect == "speculators" else None
    assert card == replace(CARDS[name], target=target)


@pytest.mark.parametrize(
    ("dialect", "shape", "shifted"),
    [
        ("deepspec", {}, True),
        ("z-lab", {}, False),
        ("specforge", {"markov": "vanilla", "rank": 4}, True),
        ("liquid", {"markov": "vanilla", "rank": 4}, True),
        ("speculators", {}, False),
        ("speculators", {"markov": "vanilla", "rank": 4}, False),
    ],
)
def test_the_order_of_rows_without_a_word(
    tmp_path: Path, dialect: Dialect, shape: dict[str, Any], shifted: bool
) -> None:
    """Without sample_from_anchor, DSpark's files predict the token behind a row, and others the row's own."""
    write_block(tmp_path, tiny_block(block_card(shape)), dialect, sample_from_anchor=None)
    block = load_head(tmp_path).card.block
    assert block is not None
    assert block.shifted == shifted


@pytest.mark.parametrize("name", ["DFlash2DraftModel", "Qwen3DFlash2Model"])
def test_dflash2_is_read(tmp_path: Path, name: str) -> None:
    """Rows predict the token at their own position; the settings may stand in dflash_config."""
    card = CARDS["dflash2"]
    config = block_config(card, "z-lab")
    own = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    nested = config["dflash_config"] | {key: config.pop(key) for key in own if key in config}
    write_block(tmp_path / "tiny block", tiny_block(card), "z-lab", sample_from_anchor=None)
    changed = {key: value for key, value in config.items() if key != "sample_from_anchor"}
    changed |= {"architectures": [name], "dflash_config": nested}
    (tmp_path / "tiny block" / "config.json").write_text(json.dumps(changed))
    assert load_head(tmp_path / "tiny block").card == card


def test_interleaved_rows_are_reordered(tmp_path: Path) -> None:
    """Liquid's files turn pairs of neighbours: rows of q and k, and numbers of their norms, go to halves of a head."""
    head = tiny_block(PLAIN)
    write_block(tmp_path, head, "liquid")
    found = load_head(tmp_path).tensors
    q, source = found["layers.0.q"].floats(), head.tensors["layers.0.q"].floats()
    assert (q[1] == source[2]).all()
    assert (q[4] == source[1]).all()
    assert (q[8 + 4] == source[8 + 1]).all()
    norm, source = found["layers.0.k_norm"].floats(), head.tensors["layers.0.k_norm"].floats()
    assert norm.tolist() == source[[0, 2, 4, 6, 1, 3, 5, 7]].tolist()
    assert (found["layers.0.k"].data == to_halves(head.tensors["layers.0.k"], 2).data).all()
    assert (found["layers.0.v"].data == head.tensors["layers.0.v"].data).all()


@pytest.mark.parametrize("n_vocab", [40, 264])
def test_copies_of_the_target_are_left_out(tmp_path: Path, n_vocab: int) -> None:
    """embed_tokens and a full lm_head are the target's own; rows of a short list are kept."""
    head = tiny_block(block_card(n_vocab_draft=n_vocab, own_embedding=True, own_output=True))
    write_block(tmp_path, head)
    card = load_head(tmp_path).card
    assert (card.own_embedding, card.own_output) == (False, n_vocab == 40)


def test_a_confidence_head_without_the_embedding_is_padded(tmp_path: Path) -> None:
    """A Markov head's confidence that sees the state alone has weights of 0 for the embedding, and a bias of 0."""
    head = tiny_block(DSPARK)
    stored = stored_block(head)
    weights = head.tensors["confidence"].floats()[:, :32]
    stored["confidence_head.proj.weight"] = ("F32", [1, 32], weights.tobytes())
    del stored["confidence_head.proj.bias"]
    write_block(tmp_path, head, confidence_head_with_markov=False)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    found = load_head(tmp_path).tensors
    assert (found["confidence"].floats() == np.concatenate((weights, np.zeros((1, 6), np.float32)), 1)).all()
    assert found["confidence_bias"].floats().tolist() == [0.0]


def test_older_names_are_read(tmp_path: Path) -> None:
    """`model.` and `logit_head.` before names, and a verifier's tensors, change nothing."""
    head = tiny_block(DSPARK)
    write_block(tmp_path, head, "specforge")
    named = {
        ("logit_head." if "head" in name else "model.") + name if name not in ("d2t", "t2d") else name: entry
        for name, entry in stored_block(head).items()
    }
    named["verifier_norm.weight"] = ("F32", [2], bytes(8))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(named))
    assert load_head(tmp_path).tensors.keys() == head.tensors.keys()


def test_turns_that_a_file_copied_from_its_target_change_nothing(tmp_path: Path) -> None:
    """DeepSpec's class turns whole heads; settings of the target's layers are in its file all the same."""
    noise: dict[str, Any] = {"partial_rotary_factor": 0.25, "attn_output_gate": True, "linear_num_key_heads": 16}
    rope = {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    write_block(tmp_path / "tiny block", tiny_block(PLAIN), rope_parameters=rope, **noise)
    assert load_head(tmp_path / "tiny block").card == PLAIN


@pytest.mark.parametrize(
    ("size", "n_proposed", "flag", "shifted"),
    [(8, 8, None, True), (8, 7, None, False), (8, 8, False, True), (8, 9, True, True), (8, 9, None, False)],
)
def test_speculators_name_the_tokens_of_a_block(
    tmp_path: Path, size: int, n_proposed: int, flag: bool | None, shifted: bool
) -> None:
    """As many tokens as rows: the first row predicts, too. What can't be is passed over, and the flag decides."""
    named = {"speculators_config": {"proposal_methods": [{"speculative_tokens": n_proposed}]}}
    head = tiny_block(block_card({"markov": "vanilla", "rank": 4, "size": size}))
    write_block(tmp_path, head, "speculators", sample_from_anchor=flag, **named)
    block = load_head(tmp_path).card.block
    assert block is not None
    assert block.shifted == shifted


@pytest.mark.parametrize(
    ("dialect", "config", "windows", "causal"),
    [
        ("speculators", {"sliding_window_non_causal": True}, (5, 0), False),
        ("z-lab", {}, (4, 0), False),
        ("z-lab", {"use_sliding_window": False}, (), False),
        ("z-lab", {"use_swa": True, "swa_window_size": 8}, (7, 7), False),
        ("specforge", {"layer_types": ["sliding_attention"] * 2}, (4, 4), True),
    ],
)
def test_windows_of_each_dialect(
    tmp_path: Path, dialect: Dialect, config: dict[str, Any], windows: tuple[int, ...], causal: bool
) -> None:
    """speculators count features before the anchor, the others rows; sliding layers may be causal."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 5}
    card = block_card({"n_layer": 2})
    if dialect == "speculators":
        layers = {"transformer_layer_config": block_config(card, dialect)["transformer_layer_config"] | layers}
    write_block(tmp_path, tiny_block(card), dialect, **layers | config)
    found = load_head(tmp_path).card
    assert found.block is not None
    assert (found.block.windows, found.block.causal) == (windows, causal)
    assert bool(found.notes) == (dialect != "speculators" and bool(windows))


def test_a_record_says_what_the_format_cannot(tmp_path: Path) -> None:
    """Name, target and promise come from edgedec-head.json, as for EAGLE-3."""
    write_block(tmp_path, tiny_block(PLAIN))
    target, promise = Target("SmolLM2", "aa", "bb", "cc"), Promise((0.5, 0.25), {"chat": (0.5,)})
    (tmp_path / RECORD_FILE).write_text(record_text("mine", target, promise))
    card = load_head(tmp_path).card
    assert (card.name, card.target, card.promise) == ("mine", target, promise)


SELECTS = {"selector_rank": 6, "sliding_window": 4, "is_causal": None}


REFUSED = {
    UnsupportedModelError: [
        ({"selector_rank": 6, "selector_top_k": 4, "markov_rank": 6}, "expected none beside selector_rank"),
        (SELECTS | {"layer_types": ["sliding_attention"], "use_sliding_window": True}, "without is_causal"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna's form"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma 4's form"),
        ({"model_type": "gemma4_text"}, "Gemma 4's form"),
        ({"model_type": "deepseek_v4"}, "DeepSeek-V4's form"),
        ({"architectures": ["Qwen35DSparkModel"]}, "gated queries"),
        ({"architectures": ["SomethingElse"], "sample_from_anchor": None}, "expected one of DFlashDraftModel"),
        ({"architectures": ["DFlashDraftModel"], "markov_rank": 6, "sample_from_anchor": None}, "either order of rows"),
        ({"projector_type": "domino"}, "Domino has a recurrent network"),
        ({"projector_type": "other"}, "projector_type is other"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type is peagle, expected eagle3"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"architectures": ["Lfm2DSparkDraftModel"], "partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"attention_value_scale": 0.5}, "attention_value_scale is 0.5"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is yarn"),
        ({"markov_head_type": "lstm", "markov_rank": 6}, "markov_head_type is lstm"),
        ({"markov_head_type": "rnn", "markov_rank": 6, "sample_from_anchor": False}, "markov_head_type is rnn"),
        ({"confidence_temperatures": [1.5]}, "confidence_temperatures"),
        ({"enable_qwen35_gated_q_proj": True}, "enable_qwen35_gated_q_proj is True"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
    ModelFormatError: [
        ({"mask_token_id": 264}, "its mask is token 264, but the target has 264"),
        ({"mask_token_id": "5"}, "mask_token_id is '5'"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 1, "sample_from_anchor": False}, "a block of 1 rows drafts nothing"),
        ({"block_size": 2**20}, "block_size is 1048576"),
        ({"num_hidden_layers": 2, "layer_types": None}, "no tensor for 'layers.1.q'"),
        ({"target_layer_ids": [1, 4, 2]}, "expected rising"),
        ({"target_layer_ids": [1, 2, 2]}, "different layers"),
        ({"target_layer_ids": None, "num_anchors": 5, "dflash_config": {}}, "names no target_layer_ids"),
        ({"target_layer_ids": [1, 2, 3, 4, 5]}, "its fc has 96 columns, expected 5 taps"),
        ({"markov_rank": 6}, "no tensor for 'markov_w1'"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"enable_confidence_head": True}, "no confidence_head.proj.weight"),
        ({"head_dim": 16}, "'layers.0.q' has the shape"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 layers, expected 1"),
        ({"selector_top_k": 4}, "its selector scores 4 tokens"),
        ({"selector_rank": 6}, "its selector scores 0 tokens"),
        ({"selector_rank": 6, "selector_top_k": 4}, "the one at their position beside a selector"),
        ({"conv_kernel_size": 2}, "groups of 0, expected a divisor of 32"),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, "groups of 5, expected a divisor of 32"),
        ({"conv_kernel_size": 2, "conv_group_size": 8}, "no tensor for 'layers.0.attention_conv_base'"),
    ],
}


@pytest.mark.parametrize(("error", "config", "named"), [(error, *row) for error in REFUSED for row in REFUSED[error]])
def test_what_edgedec_does_not_run_is_named(
    tmp_path: Path, error: type[Exception], config: dict[str, Any], named: str
) -> None:
    """A setting that would make the drafts wrong is refused, never ignored; so is config.json of another head."""
    write_block(tmp_path, tiny_block(PLAIN if error is UnsupportedModelError else CARDS["mask token"]), **config)
    with pytest.raises(error, match=named):
        load_head(tmp_path)


def test_layers_of_two_kinds_are_named(tmp_path: Path) -> None:
    """Rows of speculators' sliding layers see no later rows, and rows of other layers do."""
    write_block(tmp_path, tiny_block(block_card({"n_layer": 2, "windows": (3, 0), "causal": True})), "speculators")
    with pytest.raises(UnsupportedModelError, match="expected layers of one kind"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"fc.weight": None}, ModelFormatError, "no tensor for 'fc'"),
        ({"hidden_norm.weight": None}, ModelFormatError, "no tensor for 'hidden_norm'"),
        ({"mask": None}, ModelFormatError, "no tensor for 'mask'"),
        ({"markov_head.markov_w1.weight": ("F32", [40, 6], bytes(960))}, ModelFormatError, "'markov_w1' has the shape"),
        ({"d2t": None, "t2d": None}, ModelFormatError, "no d2t that says which"),
        ({"layers.0.self_attn.q_proj.bias": ("F32", [32], bytes(128))}, UnsupportedModelError, "q_proj.bias"),
        ({"layers.0.self_attn.sinks": ("F32", [4], bytes(16))}, UnsupportedModelError, "sinks"),
        ({"layers.1.mlp.up_proj.weight": ("F32", [64, 32], bytes(8192))}, ModelFormatError, "settings do not use"),
        ({"prefix_gru.weight": ("F32", [2], bytes(8))}, UnsupportedModelError, "prefix_gru"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, change: dict[str, Any], error: type[Exception], named: str) -> None:
    """Missing, unknown and contradicting tensors are refused."""
    head = tiny_block(DSPARK)
    write_block(tmp_path, head)
    stored = {name: entry for name, entry in (stored_block(head) | change).items() if entry is not None}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(error, match=named):
        load_head(tmp_path)


def test_a_mask_as_a_pickle_is_refused(tmp_path: Path) -> None:
    """mask_embedding.pt replaces the mask's embedding, and can run code when it is read."""
    write_block(tmp_path, tiny_block(CARDS["mask token"]))
    (tmp_path / "mask_embedding.pt").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedModelError, match="which can run code"):
        load_head(tmp_path)


@pytest.mark.parametrize("n", [7, 40, 99])
def test_a_shorter_list_cuts_the_markov_rows(n: int) -> None:
    """Rows of the output matrix and of markov_w2 are those of the tokens that stay; markov_w1 keeps all."""
    head = tiny_block(CARDS["own output"])
    short = head.shortened(n)
    assert short.card.n_vocab_draft == min(n, 40)
    for name in ("output", "markov_w2"):
        assert (short.tensors[name].floats() == head.tensors[name].floats()[:n]).all()
    assert short.tensors["markov_w1"] is head.tensors["markov_w1"]
