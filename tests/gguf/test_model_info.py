"""What describe() says of a model and of longer contexts, and which files are refused as no text decoder."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import RawTensor, Typed, tiny_text_model, write_gguf
from support.models.real_models import real_model
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

import edgedec
from edgedec.errors import EdgedecError, ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, ValueType, read_gguf
from edgedec.gguf.model_info import ModelInfo, TypeShare, context_note, describe, trained_context
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec.gguf.tensor_types import GGMLType
from edgedec.sampling import SamplingParams


def model(directory: Path, **changes: Any) -> GGUF:
    """Return the tiny text model with changed metadata: `llama__block_count=3`; None removes a key."""
    metadata, tensors = tiny_text_model()
    for name, value in changes.items():
        metadata[name.replace("__", ".")] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return read_gguf(write_gguf(directory / "m.gguf", metadata, tensors))


def test_a_tiny_model_is_described_exactly(tmp_path: Path) -> None:
    """Every field is what the metadata and tensors of the tiny model say."""
    gguf = model(tmp_path)
    assert describe(gguf) == ModelInfo(
        architecture="llama",
        name="m",
        n_params=40 + 2 * (8 + 64),
        n_bytes=(tmp_path / "m.gguf").stat().st_size,
        quantization=(TypeShare(GGMLType.F16, 2, 256, 256 / 480), TypeShare(GGMLType.F32, 3, 224, 224 / 480)),
        quantization_label="F32",
        n_ctx_train=128,
        n_ctx_scaled=128,
        n_layer=2,
        n_embd=8,
        n_head=(4, 4),
        n_head_kv=(2, 2),
        key_length=2,
        value_length=2,
        n_ff=None,
        n_rot=2,
        rope_base=10000.0,
        rope_scaling=None,
        rope_factor=None,
        rms_epsilon=None,
        sliding_window=0,
        has_recurrent_state=False,
        n_vocab=5,
        n_expert=0,
        n_expert_used=0,
        has_chat_template=True,
        license="apache-2.0",
        sampling_defaults={},
    )


def test_what_the_file_does_not_say_is_none(tmp_path: Path) -> None:
    """License, context, tokenizer and chat template are optional; heads of KV default to the query's."""
    gone = {"general__name": None, "general__license": None, "general__file_type": None, "tokenizer__chat_template": ""}
    info = describe(model(tmp_path, llama__context_length=None, llama__attention__head_count_kv=None, **gone))
    assert (info.license, info.n_ctx_train, info.has_chat_template) == (None, None, False)
    assert info.n_head_kv == (4, 4)
    assert info.quantization_label == "F16"


@pytest.mark.parametrize(("file_type", "label"), [(15, "Q4_K_M"), (1024 + 18, "Q6_K"), (38, "MXFP4"), (999, "F16")])
def test_the_label_is_what_the_quantizer_was_asked_for(tmp_path: Path, file_type: int, label: str) -> None:
    """general.file_type gives the label, with llama.cpp's "guessed" bit or without; unknown: the largest share."""
    assert describe(model(tmp_path, general__file_type=file_type)).quantization_label == label


def test_the_vocabulary_is_counted_as_llama_cpp_does(tmp_path: Path) -> None:
    """The tokenizer's list comes first, then vocab_size, then the rows of the embedding."""
    tokens = {"tokenizer__ggml__tokens": None}
    assert describe(model(tmp_path, llama__vocab_size=7)).n_vocab == 5
    assert describe(model(tmp_path, llama__vocab_size=7, **tokens)).n_vocab == 7
    assert describe(model(tmp_path, **tokens)).n_vocab == 5


# Changes to a model of 2 layers of 8 numbers with 4 query heads and 2 key-value heads, and what is read of them.
SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"n_head": (4, 4), "n_head_kv": (2, 2), "key_length": 2, "value_length": 2, "n_rot": 2}),
    ({"attention__key_length": 16}, {"key_length": 16, "value_length": 2, "n_rot": 16}),
    ({"attention__value_length": 10, "rope__dimension_count": 4}, {"key_length": 2, "value_length": 10, "n_rot": 4}),
    ({"attention__key_length_swa": 3}, {"key_length": 2}),
    ({"attention__head_count_kv": [1, 0]}, {"n_head_kv": (1, 0)}),
    ({"attention__head_count_kv": np.array([0, 4], np.uint64)}, {"n_head_kv": (0, 4)}),
    ({"attention__head_count": [0, 2]}, {"n_head": (0, 2), "key_length": 4}),
    ({"attention__sliding_window": 16}, {"sliding_window": 16}),
    ({"feed_forward_length": 24}, {"n_ff": (24, 24)}),
    ({"feed_forward_length": [24, 32]}, {"n_ff": (24, 32)}),
    ({"rope__freq_base": 5e5}, {"rope_base": 5e5}),
    (
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
        {"rope_scaling": "yarn", "rope_factor": 4.0, "n_ctx_train": 128, "n_ctx_scaled": 512},
    ),
]


@pytest.mark.parametrize(("changes", "expected"), SHAPES, ids=[str(list(c)) for c, _ in SHAPES])
def test_the_shape_is_what_the_metadata_says(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """Hyperparameters are read by layer where layers may differ, with llama.cpp's defaults where keys are absent."""
    info = describe(model(tmp_path, **{f"llama__{key}": value for key, value in changes.items()}))
    assert {name: getattr(info, name) for name in expected} == expected


def test_a_recurrent_model_has_a_state_and_no_heads(tmp_path: Path) -> None:
    """Mamba has no heads and keeps a state; a hybrid says that some layers have a state."""
    metadata = {
        "general.architecture": "mamba",
        "mamba.block_count": 3,
        "mamba.embedding_length": 8,
        "mamba.ssm.state_size": 16,
    }
    info = describe(read_gguf(write_gguf(tmp_path / "s.gguf", metadata, {"token_embd.weight": np.zeros((2, 8), "f4")})))
    assert (info.has_recurrent_state, info.n_head, info.key_length) == (True, (0, 0, 0), 0)
    assert describe(model(tmp_path, llama__ssm__state_size=16)).has_recurrent_state


def test_recommended_sampling_has_our_names(tmp_path: Path) -> None:
    """Each sampling key becomes an option of SamplingParams, with the decimals it was made from."""
    keys = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05, "penalty_last_n": 64}
    keys |= {"penalty_freq": 0.1, "penalty_present": 1.5, "mirostat": 0}
    info = describe(model(tmp_path, **{f"general__sampling__{key}": value for key, value in keys.items()}))
    assert info.sampling_defaults == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "penalty_last_n": 64,
        "frequency_penalty": 0.1,
        "presence_penalty": 1.5,
    }
    assert SamplingParams(**info.sampling_defaults).top_p == 0.95


def test_what_a_model_never_writes(tmp_path: Path) -> None:
    """The tokens that a file suppresses have the least bias; one outside the vocabulary is a refusal."""
    texts = Typed(ValueType.ARRAY, ["a", "b", "c"], ValueType.STRING)
    outside = Typed(ValueType.ARRAY, [3], ValueType.INT32)
    keys = {
        "tokenizer__ggml__tokens": texts,
        "tokenizer__ggml__suppress_tokens": Typed(ValueType.ARRAY, [0, 2], ValueType.INT32),
    }
    assert describe(model(tmp_path, **keys)).sampling_defaults == {"logit_bias": {0: -1e30, 2: -1e30}}
    with pytest.raises(ModelFormatError, match="outside the vocabulary of 3"):
        describe(model(tmp_path, tokenizer__ggml__tokens=texts, tokenizer__ggml__suppress_tokens=outside))


@pytest.mark.parametrize(
    ("key", "value", "name", "expected"),
    [
        ("temp", -1.0, "temperature", 0.0),
        ("temp", 1, "temperature", 1.0),
        ("top_k", -1, "top_k", 0),
        ("top_p", 2.0, "top_p", 1.0),
        ("min_p", -0.5, "min_p", 0.0),
        ("temp", Typed(ValueType.FLOAT64, 1e300), "temperature", 1e300),
        ("temp", Typed(ValueType.FLOAT64, 0.1234567890123), "temperature", 0.1234567890123),
    ],
)
def test_what_llama_cpp_takes_for_off_is_off(tmp_path: Path, key: str, value: Any, name: str, expected: float) -> None:
    """Values outside of our range that llama.cpp takes for "off" become our "off"."""
    defaults = describe(model(tmp_path, **{f"general__sampling__{key}": value})).sampling_defaults
    assert defaults == {name: expected}
    assert type(defaults[name]) is type(expected)


WRONG: list[tuple[str, Any, str]] = [
    ("general__architecture", 5, "general.architecture' is 5, expected text"),
    ("general__name", [1, 2], "general.name' is GGUFArray"),
    ("general__license", 1.5, "expected text"),
    ("general__file_type", "Q4", "expected a whole number from 0"),
    ("llama__block_count", "2", "expected a whole number from 0 to 1024"),
    ("llama__block_count", 1025, "is 1025, expected a whole number from 0 to 1024"),
    ("llama__block_count", True, "is True, expected a whole number"),
    ("llama__block_count", None, "no 'llama.block_count'"),
    ("llama__embedding_length", 2**40, "expected a whole number"),
    ("llama__context_length", -5, "expected a whole number"),
    ("llama__attention__head_count", None, "no 'llama.attention.head_count'"),
    ("llama__attention__head_count", [4], "or 2 of them"),
    ("llama__attention__head_count_kv", ["a", "b"], "or 2 of them"),
    ("llama__attention__head_count_kv", [-1, 1], "or 2 of them"),
    ("llama__attention__key_length", 0.5, "expected a whole number"),
    ("llama__attention__sliding_window", "x", "expected a whole number"),
    ("llama__feed_forward_length", -1, "expected a whole number from 0"),
    ("llama__rope__dimension_count", "x", "expected a whole number"),
    ("llama__rope__freq_base", "x", "expected a finite number"),
    ("llama__expert_count", "8", "expected a whole number"),
    ("tokenizer__ggml__tokens", [1, 2], "expected an array of STRING"),
    ("tokenizer__ggml__tokens", "abc", "expected an array of STRING"),
    ("tokenizer__chat_template", 3, "expected text"),
    ("general__sampling__temp", "hot", "expected a finite number"),
    ("general__sampling__temp", float("nan"), "expected a finite number"),
    ("general__sampling__temp", Typed(ValueType.FLOAT32, float("inf")), "expected a finite number"),
    ("general__sampling__top_k", 20.5, "expected a whole number"),
    ("general__sampling__top_p", 0.0, "is 0.0, which is no top_p"),
    ("general__sampling__penalty_repeat", -1.0, "which is no repetition_penalty"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG, ids=[f"{k}={v}" for k, v, _ in WRONG])
def test_a_value_of_the_wrong_type_is_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    """A missing key that every model has, or a value of the wrong type or range, is ModelFormatError."""
    with pytest.raises(ModelFormatError, match=message):
        describe(model(tmp_path, **{key: value}))


def test_the_tiny_model_is_a_text_decoder(tmp_path: Path) -> None:
    """A decoder with token embeddings, tokens and a tokenizer passes; pooling may be none, or that of a reranker."""
    require_text_decoder(model(tmp_path, llama__pooling_type=0, llama__attention__causal=True))
    require_text_decoder(model(tmp_path, llama__pooling_type=4, llama__classifier__output_labels=["yes", "no"]))
    require_text_decoder(model(tmp_path, general__type=None))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general__type": "mmproj"}, "the vision or audio encoder"),
    ({"general__type": "adapter"}, "a LoRA adapter"),
    ({"general__type": "imatrix"}, "an importance matrix"),
    ({"general__type": "weather"}, "a file of the type 'weather'"),
    ({"general__architecture": "clip"}, r"the vision or audio encoder.*architecture clip"),
    ({"general__architecture": "controlvector"}, "a control vector"),
    ({"general__architecture": "bert"}, "an embedding or reranker model"),
    ({"general__architecture": "nomic-bert-moe"}, "an embedding or reranker model"),
    ({"general__architecture": "jina-bert-v2"}, "an embedding or reranker model"),
    ({"general__architecture": "modern-bert"}, "an embedding or reranker model"),
    ({"general__architecture": "gemma-embedding"}, "an embedding or reranker model"),
    ({"general__architecture": "t5encoder"}, "an embedding or reranker model"),
    ({"general__architecture": "t5"}, "an encoder-decoder model"),
    ({"general__architecture": "llada"}, "a diffusion language model"),
    ({"general__architecture": "eagle3"}, "a draft head"),
    ({"general__architecture": "wavtokenizer-dec"}, "a vocoder"),
    ({"general__architecture": "whisper"}, "a speech model"),
    ({"general__architecture": "flux"}, "an image or video generation model"),
    ({"llama__pooling_type": 3}, "an embedding model .* with pooling type 3"),
    ({"llama__pooling_type": 5}, "an embedding model .* with pooling type 5"),
    ({"llama__attention__causal": False}, "an encoder .* without causal attention"),
    ({"tokenizer__ggml__model": None}, "without a tokenizer"),
    ({"tokenizer__ggml__model": "none"}, "without a tokenizer"),
    ({"tokenizer__ggml__tokens": None}, "without a vocabulary"),
    ({"tokenizer__ggml__tokens": Typed(ValueType.ARRAY, [], ValueType.STRING)}, "without a vocabulary"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_what_is_no_text_decoder_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Each kind of file that is no text decoder is UnsupportedModelError and called what it is."""
    with pytest.raises(UnsupportedModelError, match=f"this is .*{message}"):
        require_text_decoder(model(tmp_path, **changes))


@pytest.mark.parametrize(
    ("metadata", "tensor", "error", "message"),
    [
        ({"general.architecture": "llama"}, None, UnsupportedModelError, "a vocabulary without a model"),
        ({"general.architecture": "novel"}, "x.weight", UnsupportedModelError, "without token embeddings"),
        ({}, "model.diffusion_model.out.weight", UnsupportedModelError, "an image or video"),
        ({}, "direction.1", UnsupportedModelError, "a control vector"),
        ({}, "blk.0.attn_q.weight.lora_a", UnsupportedModelError, "a LoRA adapter"),
        ({}, "blk.0.attn_q.weight.in_sum2", UnsupportedModelError, "an importance matrix"),
        ({"general.architecture": "novel"}, "v.blk.0.weight", UnsupportedModelError, "the vision encoder"),
        ({}, "x.weight", ModelFormatError, "no 'general.architecture'"),
        ({}, None, ModelFormatError, "no 'general.architecture'"),
        ({"general.architecture": 1}, None, ModelFormatError, "expected text"),
        ({"general.type": 1}, None, ModelFormatError, "expected text"),
    ],
)
def test_a_file_is_named_by_its_tensors(
    tmp_path: Path, metadata: dict[str, Any], tensor: str | None, error: type[EdgedecError], message: str
) -> None:
    """Where metadata does not say what a file is, its tensors do; describe() then says the same."""
    tensors = {} if tensor is None else {tensor: RawTensor(GGMLType.F32, (2, 2), bytes(16))}
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    for function in (require_text_decoder, describe):
        with pytest.raises(error, match=message):
            function(gguf)


@pytest.mark.model
def test_smollm2_is_described_as_its_model_card_does() -> None:
    """SmolLM2 135M: 134.5M weights, 30 layers, 9 heads of 64 with 3 for keys and values, 8192 tokens of context."""
    gguf = read_gguf(real_model("smollm2-135m.gguf"))
    require_text_decoder(gguf)
    info = describe(gguf)
    assert (info.architecture, info.n_layer, info.n_embd, info.n_vocab) == ("llama", 30, 576, 49152)
    assert (info.n_params, info.n_ctx_train, info.quantization_label) == (134_515_008, 8192, "Q4_1")
    assert (info.n_head, info.n_head_kv, info.key_length) == ((9,) * 30, (3,) * 30, 64)
    assert [share.type.name for share in info.quantization] == ["Q4_1", "Q8_0", "F32"]
    assert (info.license, info.has_chat_template) == ("apache-2.0", True)


NOTE = (
    "the context of 300 tokens is longer than the 256 that the model was trained for: text beyond them tends to be poor"
)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A model that was trained on 256 tokens."""
    return tiny_llama(tmp_path / "m.gguf", n_ctx_train=256)


@pytest.mark.parametrize("runtime", ["cpu", "reference"])
def test_it_is_warned_of_at_load_and_told_with_each_text(
    trained: Path, runtime: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The text is made all the same; a context that was trained for, and the default one, say nothing."""
    for n_ctx, notes in ((300, [NOTE]), (256, []), (None, [])):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "edgedec.api.load"):
            engine = edgedec.load(trained, runtime=runtime, n_ctx=n_ctx, draft="off")
        assert caplog.messages == notes
        with engine:
            for _ in range(2):
                assert engine.generate("a", max_tokens=2).stats.notes == notes


def test_the_small_model_of_a_pair_counts_too(tmp_path: Path) -> None:
    """Both write in the same context."""
    large = tiny_llama(tmp_path / "large.gguf", n_ctx_train=512)
    small = tiny_llama(tmp_path / "small.gguf", n_ctx_train=256, seed=1)
    lossy = edgedec.Lossy(methods={"switching": {"small_model": small, "entropy": 0.1}})
    with edgedec.load(large, runtime="reference", n_ctx=300, lossy=lossy) as engine:
        assert engine.generate("a", max_tokens=2).stats.notes[0] == NOTE.replace("the model", "the small model")


def test_the_command_line_and_plans_say_it(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once on standard error when the model is loaded, quiet or not at all with -q; as a note of the plan."""
    monkeypatch.setenv("EDGEDEC_DRAFT", "off")
    shared = (trained, "--runtime", "reference", "-c", "300")
    found = run_here("run", *shared, "hi", "-n", "1", "--raw")
    assert found.code == 0
    assert f"edgedec: {NOTE}\n" in found.err
    assert run_here("run", *shared, "hi", "-n", "1", "--raw", "-q").err == ""
    assert json.loads(run_here("plan", *shared, "--json").out)["notes"] == [NOTE]
    assert NOTE in run_here("plan", *shared).text


def test_a_file_without_the_usual_ending_has_its_trained_context(trained: Path) -> None:
    """Such as those that ollama keeps: their default context is the trained one, and a longer one is told."""
    blob = trained.rename(trained.with_name("sha256-0123"))
    assert trained_context(blob) == 256
    with edgedec.load(blob, runtime="reference", draft="off") as engine:
        assert engine.n_ctx == 256
    assert context_note(blob, 300) == NOTE


@pytest.mark.parametrize(
    ("scaling", "n_scaled"),
    [
        ({}, 128),
        ({"type": "none", "factor": 4.0}, 128),
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, 512),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 32}, 128),
        ({"type": "linear", "factor": 0.5}, 128),
    ],
)
def test_scaled_positions_count(tmp_path: Path, scaling: dict[str, Any], n_scaled: int) -> None:
    """A length that the metadata scales to is meant to work; some files name the scaled length as the trained one."""
    metadata, tensors = tiny_text_model()
    metadata |= {f"llama.rope.scaling.{name}": value for name, value in scaling.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    info = describe(read_gguf(path))
    assert (info.n_ctx_train, info.n_ctx_scaled) == (128, n_scaled)
    assert context_note(path, n_scaled) == ""
    assert f"longer than the {n_scaled} that" in context_note(path, n_scaled + 1)


def test_a_file_that_says_nothing_is_told_nothing(tmp_path: Path) -> None:
    """Neither is one that is no model: its runtime says what is wrong."""
    (tmp_path / "x.gguf").write_bytes(b"no model")
    assert context_note(tmp_path / "x.gguf", 1 << 20) == ""
    assert trained_context(tmp_path / "nowhere") == 0
