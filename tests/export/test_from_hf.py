"""Hugging Face checkpoints become GGUFs that compute what transformers defines, with the same tokens.

Bounds are on the root mean square of the differences divided by the spread of the logits: the cpu runtime keeps keys
and values in float16, llama.cpp computes attention in it and multiplies BF16 matrices in BF16. A wrong order of rows or
a missing norm gives differences of about 1.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forwards import all_logits, distance
from support.models.hf_checkpoints import (
    BEGIN,
    END,
    LLAMA3_ROPE,
    N_VOCAB,
    TOOL,
    TinyHF,
    byte_level_tokenizer,
    hf_logits,
    sentencepiece_tokenizer,
    write_checkpoint,
)
from support.texts.token_oracle import differing_texts, differing_tokens, oracle

from edgedec.errors import EdgedecError, ModelFormatError, ModelNotFoundError, RequestError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.model_info import read_sampling_defaults
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.from_hf import convert
from edgedec_export.hf.tokenizer import pre_tokenizer_name
from edgedec_export.hf.types import ENCODERS, quantize_q8_0
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.tokenizer import open_tokenizer
from edgedec_runtimes.weights.checkpoint_names import LAYER_NAMES

TOKENS = np.random.default_rng(1).integers(0, 260, 24).astype(np.int32)
CHECKPOINTS = {
    "llama": TinyHF(),
    "llama-bf16": TinyHF(dtype="BF16", n_head_kv=1, n_files=3),
    "llama3": TinyHF(rope=LLAMA3_ROPE, tied=True, head_dim=32),
    "llama-linear": TinyHF(rope={"rope_type": "linear", "factor": 4.0}, biases=True, n_head_kv=4),
    "qwen2": TinyHF("qwen2", biases=True, dtype="F16"),
    "qwen3": TinyHF("qwen3", head_dim=32, tied=True),
    "gemma3": TinyHF("gemma3_text", n_layer=7, tied=True, rope={"rope_type": "linear", "factor": 8.0}),
    "granite": TinyHF("granite"),
    "olmo2": TinyHF("olmo2"),
    "smollm3": TinyHF("smollm3", n_layer=5, tied=True),
    "qwen3moe": TinyHF("qwen3_moe", n_expert=6, n_expert_used=2, n_files=2),
    "gemma3-multimodal": TinyHF("gemma3", n_layer=6, tied=True, prefix="language_model.model."),
}
BOUNDS = {"F32": 2e-3, "F16": 3e-3, "BF16": 1e-2}


def converted(tmp_path: Path, tiny: TinyHF = CHECKPOINTS["llama"], **config: Any) -> GGUF:
    """Write a checkpoint and return its GGUF."""
    write_checkpoint(tmp_path / "hf", tiny, config)
    return read_gguf(convert(tmp_path / "hf", tmp_path / "m.gguf"))


def changed(folder: Path, file: str, change: dict[str, Any]) -> None:
    """Replace top-level keys in a JSON file of a checkpoint."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_transformers_definition(tmp_path: Path, name: str) -> None:
    """The cpu runtime and llama.cpp give them for every architecture, dtype and form of the names."""
    tiny = CHECKPOINTS[name]
    weights = write_checkpoint(tmp_path / "hf", tiny)
    path = convert(tmp_path / "hf", tmp_path / "m.gguf")
    expected = hf_logits(tiny, weights, TOKENS)
    assert distance(all_logits(Cpu(), path, TOKENS), expected) < BOUNDS[tiny.dtype]
    assert distance(all_logits(LlamaCpp(), path, TOKENS), expected) < BOUNDS[tiny.dtype]


def test_newer_configurations_mean_the_same(tmp_path: Path) -> None:
    """The form that transformers 5 writes gives the same file.

    It has rope_parameters, for gemma3 one per kind of layer, and layer_types.
    """
    for name in ("llama3", "gemma3"):
        tiny, folder = CHECKPOINTS[name], tmp_path / name
        write_checkpoint(folder, tiny)
        old = convert(folder, tmp_path / f"{name}-old.gguf").read_bytes()
        parameters: dict[str, Any] = {"rope_theta": 1000.0, **(tiny.rope or {})}
        kinds = [
            "full_attention" if (i + 1) % 6 == 0 or name == "llama3" else "sliding_attention"
            for i in range(tiny.n_layer)
        ]
        if name == "gemma3":
            local = {"rope_type": "default", "rope_theta": 100}
            parameters = {"full_attention": parameters, "sliding_attention": local}
        new = {"rope_parameters": parameters, "rope_scaling": None, "rope_theta": None, "rope_local_base_freq": None}
        changed(folder, "config.json", new | {"layer_types": kinds})
        assert convert(folder, tmp_path / f"{name}-new.gguf").read_bytes() == old


def test_types_are_kept_or_asked_for(tmp_path: Path) -> None:
    """Matrices keep their type or get the given one, vectors become F32; Q8_0 stays within its rounding."""
    write_checkpoint(tmp_path / "hf", CHECKPOINTS["llama-bf16"])
    expected = {"KEEP": "BF16", "f32": "F32", "F16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
    file_types = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}
    for asked, found in expected.items():
        gguf = read_gguf(convert(tmp_path / "hf", tmp_path / f"{asked}.gguf", asked))
        types = {(len(tensor.shape) > 1, tensor.type.name) for tensor in gguf.tensors.values()}
        assert types == {(True, found), (False, "F32")}
        assert gguf.metadata["general.file_type"] == file_types[found]
    rounded, whole = (all_logits(Cpu(), tmp_path / f"{name}.gguf", TOKENS) for name in ("q8_0", "f32"))
    assert distance(rounded, whole) < 0.06


def test_numbers_are_rounded_as_gguf_rounds_them() -> None:
    """Q8_0, F16 and BF16 equal the gguf package's bytes, for zeros, ties and numbers of all sizes."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    values = rng.standard_normal((64, 96)).astype(np.float32) * np.logspace(-6, 4, 64, dtype=np.float32)[:, None]
    values[3] = 0
    values[4, :32] = np.arange(32) - 15.5
    values[4, 31] = 127
    quants = gguf.quants
    assert quantize_q8_0(values).tobytes() == quants.quantize(values, gguf.GGMLQuantizationType.Q8_0).tobytes()
    for name in ("F16", "BF16", "F32"):
        kind = gguf.GGMLQuantizationType[name]
        ours = ENCODERS[GGMLType[name]](values)
        assert ours == quants.quantize(values, kind).tobytes(), name


def test_names_are_those_of_gguf(tmp_path: Path) -> None:
    """The names of tensors agree with the gguf package's, for every tensor of every architecture."""
    gguf = pytest.importorskip("gguf")
    for architecture, names in LAYER_NAMES.items():
        model = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        table = gguf.get_tensor_name_map(model, 3)
        for theirs, ours in names.items():
            stem, _, suffix = theirs.rpartition(".")
            assert f"{table.get_name(f'model.layers.2.{stem}')}.{suffix}" == f"blk.2.{ours}", architecture


def test_recommended_sampling_is_kept(tmp_path: Path) -> None:
    """The GGUF recommends what generation_config.json does; a checkpoint for greedy decoding recommends nothing."""
    folder = tmp_path / "hf"
    write_checkpoint(folder, CHECKPOINTS["llama"], {})
    said = {"do_sample": True, "temperature": 0.25, "top_k": 20, "repetition_penalty": 1.5, "eos_token_id": 2}
    expected = {"temperature": 0.25, "top_k": 20, "repetition_penalty": 1.5}
    for do_sample, found in ((True, expected), (False, {})):
        (folder / "generation_config.json").write_text(json.dumps(said | {"do_sample": do_sample}), encoding="utf-8")
        path = convert(folder, tmp_path / "m.gguf", force=True)
        assert read_sampling_defaults(read_gguf(path)) == found
    for wrong in (-1, "hot", True, [0.5]):
        (folder / "generation_config.json").write_text(json.dumps({"temperature": wrong}), encoding="utf-8")
        with pytest.raises(ModelFormatError, match="temperature is"):
            convert(folder, tmp_path / "m.gguf", force=True)


@pytest.mark.slow
def test_byte_level_tokens(tmp_path: Path) -> None:
    """Merges, added tokens and BOS are those of tokenizer.json; llama.cpp's tokenizer of the file agrees with ours."""
    gguf = converted(tmp_path)
    tokenizer = open_tokenizer(gguf)
    o, r, d = (ord(letter) for letter in "ord")
    assert tokenizer.encode("hello world") == [BEGIN, 258, o, 259, o, r, ord("l"), d]
    assert tokenizer.encode("<tool><|end|>", add_special=False, parse_special=True) == [TOOL, END]
    assert len(tokenizer.encode("<|end|>", add_special=False)) == 7
    assert (tokenizer.piece(TOOL), tokenizer.piece(END)) == (b"<tool>", b"")
    assert (tokenizer.n_vocab, tokenizer.bos_token, tokenizer.eos_token) == (N_VOCAB, "<|begin|>", "<|end|>")
    assert list(gguf.metadata["tokenizer.ggml.tokens"])[-1] == "[PAD263]"  # type: ignore[arg-type]  # it is an array
    assert gguf.metadata["tokenizer.chat_template"] == "{{ messages }}"
    texts = ["hello wello", "He's 1234 \n\n  \u00e9\u4e2d\U0001f600", "<tool> <|begin|>x", ""]
    with oracle(gguf.paths[0]) as theirs:
        assert differing_texts(tokenizer, theirs, texts) == []
        assert differing_tokens(tokenizer, theirs) == []


@pytest.mark.slow
def test_sentencepiece_tokens(tmp_path: Path) -> None:
    """Merges become scores: the same pairs are merged first, and unknown characters become bytes."""
    write_sentencepiece(tmp_path / "hf", sentencepiece_tokenizer())
    gguf = read_gguf(convert(tmp_path / "hf", tmp_path / "m.gguf"))
    tokenizer = open_tokenizer(gguf)
    assert tokenizer.encode("ab abb") == [2, 264, 266, 263]  # "a b" is first of all, and "ab b" after " ab"
    assert tokenizer.encode("a  \u00e9", add_special=False) == [262, 260, 4 + 0xC3, 4 + 0xA9]
    with oracle(gguf.paths[0]) as theirs:
        assert differing_texts(tokenizer, theirs, ["ab abb  bb", "\u00e9 a", "<bos>a", "bbbb abbab"]) == []
        assert differing_tokens(tokenizer, theirs) == []


def test_merges_that_are_no_sentencepiece_are_refused(tmp_path: Path) -> None:
    """Merges with a missing pair, or with pairs of one token apart, would be applied in another order."""
    tokenizer = sentencepiece_tokenizer()
    merges = tokenizer["model"]["merges"]
    for wrong, reason in (
        (merges[:-1], "has no merge of 'ab' and 'b'"),
        (merges[-1:] + merges[:-1], "follow each other"),
    ):
        tokenizer["model"]["merges"] = wrong
        write_sentencepiece(tmp_path / "hf", tokenizer)
        with pytest.raises(UnsupportedModelError, match=reason):
            convert(tmp_path / "hf", tmp_path / "m.gguf")


def write_sentencepiece(folder: Path, tokenizer: dict[str, Any]) -> None:
    """Write a checkpoint with a SentencePiece tokenizer that has these merges."""
    write_checkpoint(folder, replace(CHECKPOINTS["gemma3"], n_layer=1, n_vocab=269))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))


UNSAID: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": [
        ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
        ({"hidden_act": "relu"}, "hidden_act is relu, expected silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is yarn"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_hidden_layers": 1}, "'model.layers.1.* does not belong to a llama model of 1 layers"),
    ],
    "gemma3": [
        ({"layer_types": ["full_attention"] * 7}, "layer_types"),
        ({"sliding_window_pattern": 4}, "sliding_window_pattern is 4, expected 6"),
        ({"query_pre_attn_scalar": 8}, "query_pre_attn_scalar is 8, expected 16"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
    "qwen3moe": [
        ({"norm_topk_prob": False}, "norm_topk_prob is False, expected true"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], expected \[\], which gives every layer experts"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1"),
        ({"num_experts": 5}, r"mlp\.experts\.5\.[a-z]+_proj\.weight' does not belong to a qwen3moe model"),
    ],
    "smollm3": [
        ({"no_rope_layers": [1] * 5}, r"no_rope_layers is \[1, 1, 1, 1, 1\], expected 0 for every 4th"),
        ({"no_rope_layer_interval": 3}, "no_rope_layer_interval is 3, expected 4"),
    ],
}


@pytest.mark.parametrize(
    ("name", "config", "reason"), [(name, *case) for name, cases in UNSAID.items() for case in cases]
)
def test_what_a_gguf_could_not_say_is_refused(tmp_path: Path, name: str, config: dict[str, Any], reason: str) -> None:
    """The error names the setting and its value, and nothing is written; llama.cpp would take a model for another."""
    with pytest.raises(UnsupportedModelError, match=reason):
        converted(tmp_path, CHECKPOINTS[name], **config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_an_expert_too_few_is_an_error(tmp_path: Path) -> None:
    """The message names the tensor that an expert is missing from."""
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_gate_exps\.weight' is missing"):
        converted(tmp_path, CHECKPOINTS["qwen3moe"], num_experts=7)


def test_layers_without_rotation_are_told_in_two_ways(tmp_path: Path) -> None:
    """Those that llama.cpp assumes may be told as numbers or as their period."""
    tiny = CHECKPOINTS["smollm3"]
    told = converted(tmp_path / "a", tiny, no_rope_layers=[1, 1, 1, 0, 1], no_rope_layer_interval=4)
    assert told.paths[0].read_bytes() == converted(tmp_path / "b", tiny).paths[0].read_bytes()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer is unknown: .*Whitespace"),
        ({"normalizer": {"type": "Lowercase"}}, r"normalizer is \['Lowercase'\]"),
        ({"post_processor": {"type": "RobertaProcessing"}}, "RobertaProcessing"),
        ({"added_tokens": [{"id": 260, "content": "<x>", "rstrip": True}]}, "'<x>' has rstrip"),
        ({"model": {"type": "Unigram", "vocab": {"a": 0}}}, "'Unigram', expected 'BPE'"),
        ({"model": byte_level_tokenizer()["model"] | {"ignore_merges": True}}, "ignore_merges is True"),
    ],
)
def test_rules_of_tokenizers_that_llamacpp_lacks_are_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """The error names the rule."""
    write_checkpoint(tmp_path / "hf", TinyHF())
    changed(tmp_path / "hf", "tokenizer.json", change)
    with pytest.raises(UnsupportedModelError, match=reason):
        convert(tmp_path / "hf", tmp_path / "m.gguf")


def test_pre_tokenizers_of_known_models_have_their_names() -> None:
    """Steps may be in a sequence or alone; one digit more makes an expression unknown."""
    words = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert pre_tokenizer_name(words) == "gpt-2"
    assert pre_tokenizer_name({"type": "Sequence", "pretokenizers": [digits, words]}) == "smollm"
    qwen = byte_level_tokenizer()["pre_tokenizer"]
    assert pre_tokenizer_name(qwen) == "qwen2"
    split = qwen["pretokenizers"][0]
    split["pattern"]["Regex"] = split["pattern"]["Regex"].replace(r"\p{N}|", r"\p{N}{1,3}|")
    assert pre_tokenizer_name(qwen) == "llama-bpe"
    split["pattern"]["Regex"] = split["pattern"]["Regex"].replace("{1,3}", "{1,4}")
    assert pre_tokenizer_name(qwen) is None
    assert pre_tokenizer_name(None) is None


def test_a_result_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """An existing file, an unknown type, a missing or a truncated file are errors that leave no files."""
    write_checkpoint(tmp_path / "hf", TinyHF())
    out = tmp_path / "m.gguf"
    convert(tmp_path / "hf", out)
    with pytest.raises(RequestError, match="the file exists"):
        convert(tmp_path / "hf", out)
    assert convert(tmp_path / "hf", out, force=True) == out
    with pytest.raises(RequestError, match="type 'Q4_K_M': expected one of KEEP, F32"):
        convert(tmp_path / "hf", tmp_path / "n.gguf", "Q4_K_M")
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        convert(tmp_path / "nowhere", tmp_path / "n.gguf")
    (tmp_path / "hf/tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json: the file is missing"):
        convert(tmp_path / "hf", tmp_path / "n.gguf")
    weights = tmp_path / "hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelFormatError, match=r"needs \d+ bytes, but is at"):
        convert(tmp_path / "hf", tmp_path / "n.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.gguf"]


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 3, 2**70, 1e400, "x", "\ud800", [], {}, [[]], [None], {"type": "Sequence"}]
)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_fuzzed_settings_are_converted_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any value at any place of the JSON files gives a GGUF or an EdgedecError."""
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    if data.draw(st.booleans()):
        write_sentencepiece(folder, sentencepiece_tokenizer())
    else:
        write_checkpoint(folder, replace(CHECKPOINTS["llama3"], n_layer=1))
    path = folder / data.draw(st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json"]))
    document = json.loads(path.read_text())
    place: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(ODD)
        break
    path.write_text(json.dumps(document))
    try:
        convert(folder, folder / "m.gguf", force=True)
    except EdgedecError:
        return
    assert read_gguf(folder / "m.gguf").tensors
