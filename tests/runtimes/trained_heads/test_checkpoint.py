"""EAGLE-3 checkpoints are read in both dialects, and what edgedec does not run is refused by name.

Damaged heads of any form are refused with an EdgedecError, or are heads whose every tensor can be used.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.head_mutants import mutant, sound_heads
from support.heads.tiny_heads import KINDS, TinyHead, head_config, head_weights, stored_tensors, write_head
from support.models.hf_checkpoints import safetensors_bytes

from edgedec.errors import EdgedecError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec_runtimes.trained_heads.card import Promise, Target
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text

PLAIN = KINDS["plain"]


@pytest.mark.parametrize("tiny", KINDS.values(), ids=KINDS)
def test_every_setting_and_tensor_is_read(tmp_path: Path, tiny: TinyHead) -> None:
    """The card has what config.json says, and the tensors have the numbers that were written."""
    weights = write_head(tmp_path, tiny)
    head = load_head(tmp_path)
    card = head.card
    for name in (
        *("n_embd", "n_embd_target", "n_ff", "n_head", "n_head_kv", "head_dim", "taps", "n_vocab_draft"),
        *("n_vocab_target", "norm_before_residual", "fc_norm", "feeds_back_normed", "norms_output", "own_embedding"),
        "own_output",
    ):
        assert getattr(card, name) == getattr(tiny, name), name
    assert (card.rms_epsilon, card.rope_base) == (1e-5, 5000.0)
    assert (head.d2t == weights.pop("d2t").astype(np.int32)).all()
    assert head.tensors.keys() == weights.keys()
    for name, values in weights.items():
        assert (head.tensors[name].floats() == values).all(), name


def test_files_in_the_folder_stand_for_it(tmp_path: Path) -> None:
    """A path to the weights or to config.json loads the head."""
    write_head(tmp_path, PLAIN)
    assert load_head(tmp_path / "model.safetensors").card == load_head(tmp_path / "config.json").card


def test_half_floats_keep_their_bytes(tmp_path: Path) -> None:
    """A head in F16 or BF16 is held as it is stored."""
    stored = stored_tensors(PLAIN, head_weights(PLAIN))
    name = "midlayer.mlp.up_proj.weight"
    values = np.frombuffer(stored[name][2], np.float32)
    stored[name] = ("F16", stored[name][1], values.astype(np.float16).tobytes())
    write_head(tmp_path, PLAIN)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    up = load_head(tmp_path).tensors["up"]
    assert (up.type.name, up.data.nbytes) == ("F16", 2 * values.size)
    assert (up.floats().ravel() == values.astype(np.float16).astype(np.float32)).all()


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 13, 24]}, (2, 14, 25)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 14, 25]}, (2, 14, 25)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 13, 24], "use_aux_hidden_state": True}},
            (2, 14, 25),
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}}, (24, 30, 36)),
    ],
)
def test_layer_ids_of_either_convention(tmp_path: Path, config: dict[str, Any], taps: tuple[int, ...]) -> None:
    """Where the first id is 1 the ids are outputs and 1 is added; otherwise they are inputs."""
    write_head(tmp_path, replace(PLAIN, config={"eagle_aux_hidden_state_layer_ids": None} | config))
    assert load_head(tmp_path).card.taps == taps


def test_layers_that_no_file_names_are_left_open(tmp_path: Path) -> None:
    """The card then has no taps and a note that says so; a record fills them in."""
    write_head(tmp_path, replace(PLAIN, config={"eagle_aux_hidden_state_layer_ids": None}))
    card = load_head(tmp_path).card
    assert card.taps == ()
    assert "does not name the layers" in card.notes[0]
    (tmp_path / RECORD_FILE).write_text(record_text("h", None, None, taps=[3, 4, 5]))
    card = load_head(tmp_path).card
    assert (card.taps, card.notes) == ((3, 4, 5), ())


def test_a_record_says_what_the_format_cannot(tmp_path: Path) -> None:
    """The target, what the head promises and which state is fed back come from edgedec-head.json."""
    write_head(tmp_path, PLAIN)
    target = Target("SmolLM2", "aa", "bb", "cc")
    promise = Promise((0.5, 0.25), {"chat": (0.5,), "math": (0.75, 0.5)})
    text = record_text("my head", target, promise, about={"tokens": 5_200_000}, feeds_back_normed=True)
    (tmp_path / RECORD_FILE).write_text(text)
    card = load_head(tmp_path).card
    assert (card.name, card.target, card.promise, card.feeds_back_normed) == ("my head", target, promise, True)


def test_a_word_with_two_meanings_is_noted(tmp_path: Path) -> None:
    """norm_output: true in a flat file is read as SpecForge means it, and the card says so."""
    write_head(tmp_path, replace(PLAIN, config={"norm_output": True}))
    card = load_head(tmp_path).card
    assert (card.norms_output, card.feeds_back_normed) == (True, False)
    assert "feeds_back_normed" in card.notes[0]


def test_rope_scaling_becomes_divisors(tmp_path: Path) -> None:
    """linear and llama3 scaling are a divisor for each frequency, in either form of transformers."""
    write_head(tmp_path, replace(PLAIN, config={"rope_scaling": {"type": "linear", "factor": 4.0}}))
    assert load_head(tmp_path).tensors["rope_divisors"].floats().tolist() == [4.0] * 4
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 64, "rope_theta": 700.0}
    write_head(tmp_path, replace(PLAIN, config={"rope_parameters": llama3, "rope_theta": None}))
    head = load_head(tmp_path)
    divisors = head.tensors["rope_divisors"].floats()
    assert head.card.rope_base == 700.0
    assert divisors[0] == 1
    assert divisors[-1] == 8


def test_a_full_vocabulary_needs_no_map(tmp_path: Path) -> None:
    """Without d2t, row i of the output matrix is token i."""
    tiny = TinyHead(n_vocab_draft=264, own_output=True)
    write_head(tmp_path, tiny)
    stored = stored_tensors(tiny, head_weights(tiny))
    del stored["d2t"], stored["t2d"]
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    assert (load_head(tmp_path).d2t == np.arange(264)).all()


REFUSED = {
    UnsupportedModelError: [
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is yarn"),
        ({"residual_multiplier": 0.5}, "residual_multiplier is 0.5"),
        ({"use_gate": True}, "use_gate is True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm is True"),
        ({"norm_before_fc": True}, "no norm before fc"),
        ({"norm_output": False}, "norm_output is false beside the target's output matrix"),
        ({"speculators_model_type": "eagle3", "norm_before_residual": None}, "norm_before_residual"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type is peagle"),
    ],
    ModelFormatError: [
        ({"num_attention_heads": 3}, "cannot share"),
        ({"hidden_size": 40}, "'fc' has the shape"),
        ({"head_dim": 16}, "'q' has the shape"),
        ({"target_hidden_size": 33}, "3 taps of 33"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}, "different layers"),
        ({"eagle_aux_hidden_state_layer_ids": "2, 3, 4"}, "different layers"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is 1e-6"),
    ],
}


@pytest.mark.parametrize(("error", "config", "named"), [(error, *row) for error in REFUSED for row in REFUSED[error]])
def test_settings_that_edgedec_does_not_run_are_named(
    tmp_path: Path, error: type[Exception], config: dict[str, Any], named: str
) -> None:
    """A setting that would make the drafts wrong is refused, never ignored; so is config.json of another head."""
    write_head(tmp_path, replace(PLAIN, config=config))
    with pytest.raises(error, match=named):
        load_head(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("midlayer.self_attn.q_norm.weight", "midlayer.self_attn.q_proj.bias", "mask_hidden"),
        "layers.1.mlp.up_proj.weight",
    ],
)
def test_unknown_tensors_are_named(tmp_path: Path, name: str) -> None:
    """A tensor that this head would need, and edgedec would leave out, is refused."""
    write_head(tmp_path, PLAIN)
    stored = stored_tensors(PLAIN, head_weights(PLAIN)) | {name: ("F32", [8], bytes(32))}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(UnsupportedModelError, match=name):
        load_head(tmp_path)


def _offsets(*ids: int) -> tuple[str, list[int], bytes]:
    return "I64", [len(ids)], (np.array(ids, np.int64) - np.arange(len(ids))).tobytes()


def _one_of(dtype: Any, value: float) -> bytes:
    """Return a matrix of zeros, as bytes, with one other number in the middle."""
    values = np.zeros(32 * 96, dtype)
    values[1000] = value
    return values.tobytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fc.weight": None}, "no tensor for 'fc'"),
        ({"norm.weight": None}, "no tensor for 'output_norm'"),
        ({"norm.weight": ("F32", [32], np.full(32, np.nan, np.float32).tobytes())}, "not finite"),
        (
            {"fc.weight": ("F32", [32, 96], _one_of(np.float32, np.inf))},
            "tensor 'fc' holds numbers that are not finite",
        ),
        ({"fc.weight": ("F16", [32, 96], _one_of(np.float16, -np.inf))}, "tensor 'fc' holds"),
        ({"fc.weight": ("BF16", [32, 96], _one_of(np.uint16, 0x7FC0))}, "tensor 'fc' holds"),
        ({"d2t": None}, "no d2t"),
        ({"d2t": _offsets(*range(39), 264), "t2d": None}, "beyond the target's 264"),
        ({"d2t": _offsets(*range(39), -1), "t2d": None}, "beyond the target's 264"),
        ({"d2t": _offsets(*range(39), 38), "t2d": None}, "names a token twice"),
        ({"d2t": ("I64", [40], np.full(40, -(2**63), np.int64).tobytes())}, "beyond the target's 264"),
        ({"d2t": _offsets(*range(40))}, "t2d marks other tokens"),
        ({"layers.0.mlp.up_proj.weight": ("F32", [64, 32], bytes(64 * 32 * 4))}, "it has both"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """Missing tensors, and a map that can't be right, are refused."""
    write_head(tmp_path, PLAIN)
    stored = stored_tensors(PLAIN, head_weights(PLAIN)) | change
    stored = {name: entry for name, entry in stored.items() if entry is not None}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(ModelFormatError, match=named):
        load_head(tmp_path)


def test_weights_as_a_pickle_are_refused(tmp_path: Path) -> None:
    """A .bin file can run code when it is read: the message says what to do instead."""
    (tmp_path / "config.json").write_text(json.dumps(head_config(PLAIN)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelNotFoundError, match="convert it to safetensors"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"reach": [0.5, 0.6]}, "none above the one before"),
        ({"reach": [2]}, "from 0 to 1"),
        ({"taps": [1, 1]}, "different layers"),
        ({"target": {"weights": 3}}, "weights is 3"),
        ({"reach": [0.5], "reach_by_kind": {"chat": 1}}, "reach_by_kind of 'chat'"),
    ],
)
def test_a_wrong_record_is_named(tmp_path: Path, record: dict[str, Any], named: str) -> None:
    """A record with a value of the wrong kind is refused, and so is an unknown key."""
    write_head(tmp_path, PLAIN)
    (tmp_path / RECORD_FILE).write_text(json.dumps(record))
    with pytest.raises(ModelFormatError, match=named):
        load_head(tmp_path)
    (tmp_path / RECORD_FILE).write_text(json.dumps({"reaches": 1}))
    with pytest.raises(UnsupportedModelError, match="'reaches'"):
        load_head(tmp_path)


@pytest.mark.slow
def test_the_sound_heads_load(tmp_path: Path) -> None:
    """Else the mutants would be refused for what is wrong with all of them."""
    for i, files in enumerate(sound_heads()):
        files.write(tmp_path / str(i))
        assert load_head(tmp_path / str(i)).card.n_embd == 32


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_mutants_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    """250 mutants a seed; some of each must load, or the damage would be too coarse to test anything."""
    rng, heads, n_loaded = random.Random(seed), sound_heads(), 0
    refusals: list[str] = []
    for _ in range(250):
        mutant(rng, heads).write(tmp_path)
        try:
            head = load_head(tmp_path)
        except EdgedecError as error:
            refusals.append(str(error))
            continue
        n_loaded += 1
        assert all(tensor.floats().shape == tensor.shape for tensor in head.tensors.values())
        assert 0 <= head.d2t.min() <= head.d2t.max() < head.card.n_vocab_target
        assert len(np.unique(head.d2t)) == head.card.n_vocab_draft
    assert n_loaded > 5
    assert [text for text in refusals if not text.isprintable()] == [], "a terminal can't show these"
