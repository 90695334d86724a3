"""Which contradictions in a model's header are refused before llama.cpp dies of them, and what is not refused."""

import struct
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import tiny_text_model, write_gguf
from support.models.real_models import real_model
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF, GGUFArray, TensorInfo, ValueType, read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.shared.consistency import require_consistent

TOKENS = "tokenizer.ggml.tokens"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> GGUF:
    """A sound tiny Llama: 2 layers of 4 heads and 2 KV heads of length 16, 64 wide, 260 tokens."""
    return read_gguf(tiny_llama(tmp_path_factory.mktemp("checks") / "llama.gguf"))


def changed(gguf: GGUF, metadata: dict[str, Any], tensors: dict[str, TensorInfo | None] | None = None) -> GGUF:
    """Return the model with other metadata and tensors; None takes one out."""
    values = {key: value for key, value in (dict(gguf.metadata) | metadata).items() if value is not None}
    infos = {name: tensor for name, tensor in (dict(gguf.tensors) | (tensors or {})).items() if tensor is not None}
    return replace(gguf, metadata=MappingProxyType(values), tensors=MappingProxyType(infos))


def renamed(gguf: GGUF, architecture: str, **metadata: Any) -> GGUF:
    """Return the model under the name of another architecture: `attention__scale=1.0` adds a key of its own."""
    own = {f"{architecture}.{key[6:]}": value for key, value in gguf.metadata.items() if key.startswith("llama.")}
    own |= {f"{architecture}.{name.replace('__', '.')}": value for name, value in metadata.items()}
    return changed(gguf, {"general.architecture": architecture} | own)


def strings(texts: list[bytes]) -> GGUFArray:
    """Return an array of strings, as a file holds it."""
    return GGUFArray(ValueType.STRING, len(texts), b"".join(struct.pack("<Q", len(text)) + text for text in texts))


def numbers(values: Any, dtype: str) -> GGUFArray:
    """Return an array of numbers of one of the types u1, i4, u4 and f4."""
    kinds = {"u1": ValueType.UINT8, "i4": ValueType.INT32, "u4": ValueType.UINT32, "f4": ValueType.FLOAT32}
    array = np.array(values, dtype)
    return GGUFArray(kinds[dtype], len(array), array.tobytes())


def with_token(gguf: GGUF, token_id: int, text: bytes) -> GGUF:
    """Return the model with another text for a token."""
    array = gguf.metadata[TOKENS]
    assert isinstance(array, GGUFArray)
    texts = [token.encode() for token in array]
    texts[token_id] = text
    return changed(gguf, {TOKENS: strings(texts)})


METADATA = [
    ({"block_count": 0}, "block_count is 0, expected 1 to 512"),
    ({"block_count": 513}, "block_count is 513, expected 1 to 512"),
    ({"block_count": 3}, r"block_count is 3, and the tensors are of 2 layers, expected the same \(layer '2'"),
    ({"embedding_length": 0}, "embedding_length is 0, expected 1 or more"),
    ({"embedding_length": 128, "rope.dimension_count": 32}, r"weight has the shape \(64, 260\), expected \(128,"),
    ({"attention.head_count": 0}, "head_count is 0, expected 1 or more"),
    ({"attention.head_count": 128}, "key_length is 0, expected 1 or more"),
    ({"attention.head_count_kv": 3}, "layer 0 has 4 heads and 3 KV heads, expected a multiple"),
    ({"attention.head_count_kv": 8}, "layer 0 has 4 heads and 8 KV heads, expected a multiple"),
    ({"attention.head_count_kv": numbers([2, 4], "u4")}, "the layers differ in their numbers of heads"),
    ({"attention.head_count_kv": numbers([2], "u4")}, "'llama.attention.head_count_kv' is .*expected"),
    ({"attention.key_length": 0}, "key_length is 0, expected 1 or more"),
    ({"attention.key_length": 32}, "a key has the length 32, a value 16, and 16 are rotated"),
    ({"attention.value_length": 8}, "a key has the length 16, a value 8, and 16 are rotated"),
    ({"rope.dimension_count": 8}, "a value 16, and 8 are rotated, expected the same three times"),
    ({"rope.dimension_count": 15}, "dimension_count is 15, expected an even number from 2 up to the key length 16"),
    ({"rope.dimension_count": 32}, "dimension_count is 32, expected an even number from 2 up to the key length 16"),
    ({"rope.dimension_count_swa": 0}, "dimension_count_swa is 0, expected an even number from 2"),
    ({"attention.key_length_swa": 8}, "dimension_count_swa is 16, expected an even number from 2 up to .* 8"),
    ({"rope.dimension_count_swa": 18}, "dimension_count_swa is 18, expected an even number"),
    ({"rope.freq_base": 0.0}, "freq_base is 0.0, expected more than 0"),
    ({"rope.freq_base": float("nan")}, "'llama.rope.freq_base' is nan, expected a finite number"),
    ({"rope.scaling.factor": float("inf")}, "'llama.rope.scaling.factor' is inf, expected a finite number"),
    ({"rope.scaling.type": "mrope"}, "is 'mrope', expected none or linear or yarn or longrope"),
    ({"attention.layer_norm_rms_epsilon": -1e-5}, "rms_epsilon is -1e-05, expected 0 or more"),
    ({"expert_used_count": 2}, "2 of 0 experts are used, expected"),
    ({"expert_count": 4}, "0 of 4 experts are used, expected"),
    ({"expert_count": 2000, "expert_used_count": 2}, "2 of 2000 experts are used, expected 1 up to all"),
    ({"expert_group_count": 1}, "0 experts are in 1 group, expected 2 experts or more"),
    ({"expert_group_count": 2}, "0 experts are in 2 groups, 0 of them used"),
    ({"nextn_predict_layers": 2}, "'llama.nextn_predict_layers' is 2, expected a whole number from 0 to 1"),
    ({"attention.shared_kv_layers": 1}, "shared_kv_layers' is 1, expected a whole number from 0"),
    ({"full_attention_interval": 0}, "'llama.full_attention_interval' is 0, expected a whole number from 1"),
    ({"attention.recurrent_layers": 2}, "recurrent_layers' is 2, expected a whole number from 0"),
    ({"attention.value_length_swa": "x"}, "'llama.attention.value_length_swa' is 'x', expected a whole number"),
    ({"attention.sliding_window": 2**31 - 1}, "sliding_window' is 2147483647, expected a whole number"),
    (
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": 1},
        "sliding_window_pattern gives no layer a window",
    ),
    ({"feed_forward_length": 64}, r"ffn_gate.weight has the shape \(64, 128\), expected \(64, 64\)"),
    ({"tokenizer.ggml.scores": numbers([0] * 259, "f4")}, "scores has 259 elements, expected 260"),
    ({"tokenizer.ggml.token_type": numbers([1] * 261, "i4")}, "token_type has 261 elements, expected 260"),
    ({"tokenizer.ggml.scores": 1.0}, "'tokenizer.ggml.scores' is 1.0, expected an array of FLOAT32 or INT32"),
    ({TOKENS: strings([b"%d" % i for i in range(259)])}, r"has the shape \(64, 260\), expected \(64, 259\)"),
    ({TOKENS: strings([b"%d" % i for i in range(260)])}, "no token for 233 bytes, such as <0x00>"),
    ({"tokenizer.ggml.model": "rwkv"}, r"no token for 243 bytes, such as \\x00"),
    ({"tokenizer.ggml.model": "bert"}, "tokens of the tokenizer bert are bytes"),
    (
        {"tokenizer.ggml.model": "t5", "tokenizer.ggml.bos_token_id": 260},
        "every text gets the token bos, and tokenizer.ggml.bos_token_id is 260, expected a token, 0 to 259",
    ),
    ({"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.bos_token_id": None}, "every text gets the token bos"),
]


@pytest.mark.parametrize(("metadata", "message"), METADATA, ids=[str(i) for i in range(len(METADATA))])
def test_contradictory_metadata(llama: GGUF, metadata: dict[str, Any], message: str) -> None:
    """A value that contradicts others, the tensors or llama.cpp's limits is refused with both sides."""
    named = {key if key.startswith("tokenizer") else f"llama.{key}": value for key, value in metadata.items()}
    with pytest.raises(ModelFormatError, match=message) as refusal:
        require_consistent(changed(llama, named))
    assert str(refusal.value).startswith(str(llama.paths[0]))
    assert str(refusal.value).endswith("download another GGUF of the model")


def info(name: str, *, shape: tuple[int, ...], type: GGMLType = GGMLType.F32) -> dict[str, TensorInfo | None]:
    """Return a tensor under its name, to be put in the place of another."""
    return {name: TensorInfo(name, shape, type, 0, 0, 0)}


TENSORS = [
    (info("blk.1.attn_k.weight", shape=(32, 64)), r"attn_k.weight has the shape \(32, 64\), expected \(64, 32\)"),
    (info("blk.1.attn_k.weight", shape=(64,)), r"attn_k.weight has the shape \(64,\), expected \(64, 32\)"),
    (info("blk.0.ffn_down.weight", shape=(128, 64, 2)), r"has the shape \(128, 64, 2\), expected \(128, 64\)"),
    (info("blk.0.attn_qkv.weight", shape=(64, 64)), r"attn_qkv.weight has the shape \(64, 64\), expected \(64, 128\)"),
    (info("output.weight", shape=(64, 259)), r"output.weight has the shape \(64, 259\), expected \(64, 260\)"),
    (info("token_embd.weight", shape=(260, 64)), r"token_embd.weight has the shape \(260, 64\), expected \(64, 260\)"),
    ({"blk.1.attn_v.weight": None}, r"there is no tensor blk.1.attn_v.weight, expected one of the shape \(64, 32\)"),
    ({"output_norm.weight": None}, "there is no tensor output_norm.weight"),
    (info("blk.2.attn_k.weight", shape=(64, 32)), "block_count is 2, and the tensors are of 3 layers"),
    (info("blk.0.attn_q.weight", shape=(64, 64), type=GGMLType.I32), "of the type I32, expected a type of weights"),
    (info("token_embd.weight", shape=(64, 260), type=GGMLType.F64), "of the type F64, expected a type of weights"),
    (info("blk.0.ffn_norm.weight", shape=(64,), type=GGMLType.F16), "of the type F16, expected F32"),
    (info("blk.0.attn_q.bias", shape=(64,), type=GGMLType.Q8_0), "attn_q.bias is of the type Q8_0, expected F32"),
]


@pytest.mark.parametrize(("tensors", "message"), TENSORS, ids=[str(i) for i in range(len(TENSORS))])
def test_contradictory_tensors(llama: GGUF, tensors: dict[str, TensorInfo | None], message: str) -> None:
    """A tensor that is missing, or of a shape or type that the computation can't take, is refused."""
    with pytest.raises(ModelFormatError, match=message):
        require_consistent(changed(llama, {}, tensors))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"<0x41>", "has the token b'<0x41>' more than once"),
        (b"<0x41>\0more", "has the token b'<0x41>' more than once"),
        (b"other", "no token for 1 bytes, such as <0x42>"),
        (b"", "no token for 1 bytes, such as <0x42>"),
    ],
)
def test_vocabularies_that_cannot_spell(llama: GGUF, text: bytes, message: str) -> None:
    """A token that is there twice, as llama.cpp reads it, or one that leaves a byte without token is refused."""
    with pytest.raises(ModelFormatError, match=message):
        require_consistent(with_token(llama, 4 + 0x42, text))


def test_tokens_of_absurd_length(llama: GGUF) -> None:
    """A token that llama.cpp would recurse into byte by byte, or take hours for, is refused; a long one is not."""
    require_consistent(with_token(llama, 3, b"x" * 4096))
    with pytest.raises(ModelFormatError, match="has a token of 4097 bytes, expected at most 4096"):
        require_consistent(with_token(llama, 3, b"x" * 4097))
    require_consistent(changed(with_token(llama, 3, b"x" * 1000), {"tokenizer.ggml.model": "plamo2"}))
    with pytest.raises(ModelFormatError, match="tokenizer plamo2 is of long tokens"):
        require_consistent(changed(with_token(llama, 3, b"x" * 1100), {"tokenizer.ggml.model": "plamo2"}))


def test_vocabularies_that_are_odd_and_sound(llama: GGUF) -> None:
    """Malformed UTF-8, a bare byte, a byte that no text has and ids out of range that llama.cpp ignores are fine."""
    require_consistent(with_token(llama, 4 + 0x42, b"B"))
    require_consistent(with_token(llama, 4 + 0xFF, b"\xff\xfe"))
    require_consistent(with_token(with_token(llama, 4 + 0xFF, b"\xff\xfe"), 4 + 0xC0, b"\xff\xfd"))
    require_consistent(with_token(llama, 4 + 0xFF, b""))
    require_consistent(changed(llama, {"tokenizer.ggml.padding_token_id": 2**32 - 1}))
    require_consistent(changed(llama, {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": 10**6}))
    require_consistent(changed(llama, {"tokenizer.ggml.scores": None, "tokenizer.ggml.token_type": None}))


def charsmap(nodes: list[int], texts: bytes) -> GGUFArray:
    """Return a table of replaced characters: its size in bytes, its nodes, and the texts."""
    return numbers(
        np.frombuffer(struct.pack("<I", 4 * len(nodes)) + np.array(nodes, "<u4").tobytes() + texts, "u1"), "u1"
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (charsmap([0] * 256, b"a\0"), None),
        # "A" steps to node 65, an end, whose offset leads to node 64: the place of a text.
        (charsmap([0] * 64 + [2**31 + 1, 1 << 10 | 0x141] + [0] * 190, b"a\0"), None),
        (charsmap([0] * 64 + [2**31 + 2, 1 << 10 | 0x141] + [0] * 190, b"a\0"), "256 nodes and 2 bytes of text"),
        (charsmap([0] * 255, b"a\0"), "leads outside its 255 nodes"),
        (charsmap([0] * 255 + [256 << 10], b"a\0"), "leads outside its 256 nodes"),
        (charsmap([0] * 256, b"a"), "expected a table, then texts that end in NUL"),
        (charsmap([0] * 256, b""), "has 1028 bytes, 1024 of them its table"),
        (numbers([255, 255, 255, 255, 0], "u1"), "has 5 bytes, 4294967295 of them its table"),
        (numbers([0, 0], "u1"), "has 2 bytes, 0 of them its table"),
    ],
)
def test_tables_of_replaced_characters(llama: GGUF, table: GGUFArray, message: str | None) -> None:
    """A SentencePiece table is refused where a step of its double array, or the place of a text, is outside of it."""
    gguf = changed(llama, {"tokenizer.ggml.model": "t5", "tokenizer.ggml.precompiled_charsmap": table})
    if message is None:
        require_consistent(gguf)
    else:
        with pytest.raises(ModelFormatError, match=message):
            require_consistent(gguf)


def test_byte_pair_vocabularies_need_bos_where_it_is_added(llama: GGUF) -> None:
    """Without a BOS of its own a small byte-pair vocabulary is fine, unless its pre-tokenizer or a key adds one."""
    embedding = info("token_embd.weight", shape=(64, 5)) | {"output.weight": None}
    arrays = dict.fromkeys(["tokenizer.ggml.scores", "tokenizer.ggml.token_type"])
    ids = dict.fromkeys(["tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token"])
    tokens = {TOKENS: strings([b"a", b"b", b"c", b"d", b"e"]), "tokenizer.ggml.model": "gpt2"}
    small = changed(llama, arrays | ids | tokens, embedding)
    require_consistent(small)
    require_consistent(changed(small, {"tokenizer.ggml.pre": "qwen2"}))
    require_consistent(changed(small, {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 4}))
    require_consistent(changed(small, {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}))
    for keys in ({"tokenizer.ggml.pre": "llama-bpe"}, {"tokenizer.ggml.add_bos_token": True}):
        with pytest.raises(ModelFormatError, match=r"every text gets the token bos, and .* is None, expected a token"):
            require_consistent(changed(small, keys))


@pytest.mark.parametrize("options", [{}, {"architecture": "qwen2"}, {"dtype": "f16", "tied": True}, {"n_vocab": 300}])
def test_tiny_models_are_accepted(tmp_path: Path, options: dict[str, Any]) -> None:
    """What the tests' own models say fits together, tied and with unused tokens."""
    require_consistent(read_gguf(tiny_llama(tmp_path / "tiny.gguf", **options)))


def test_other_architectures_keep_their_ways(llama: GGUF) -> None:
    """Where nothing is known of an architecture, lengths may differ, layers differ and tensors be others."""
    odd = renamed(
        llama,
        "unheard-of",
        attention__key_length=24,
        attention__value_length=12,
        rope__dimension_count=8,
        attention__head_count=numbers([0, 4], "u4"),
        attention__head_count_kv=numbers([0, 1], "u4"),
        feed_forward_length=numbers([0, 512], "u4"),
        ssm__state_size=16,
    )
    more = info("blk.7.id_map.weight", shape=(3, 5), type=GGMLType.I32) | {"blk.1.attn_v.weight": None}
    require_consistent(changed(odd, {}, more))
    require_consistent(renamed(llama, "nemotron", rope__dimension_count=8))
    require_consistent(renamed(llama, "granitehybrid", rope__dimension_count=0, ssm__state_size=16))
    with pytest.raises(ModelFormatError, match="and 8 are rotated"):
        require_consistent(renamed(llama, "granite", rope__dimension_count=8))


def test_experts_in_groups(llama: GGUF) -> None:
    """Groups of experts must be of one size and not all be used."""
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_group_used_count": 2}
    require_consistent(renamed(llama, "deepseek2", **experts, expert_group_count=4))
    require_consistent(renamed(llama, "deepseek2", **experts, expert_group_count=1))
    for n_groups in (2, 3, 8, 16):
        with pytest.raises(ModelFormatError, match=f"8 experts are in {n_groups} groups, 2 of them used"):
            require_consistent(renamed(llama, "deepseek2", **experts, expert_group_count=n_groups))


@pytest.mark.slow
def test_the_runtime_asks_first(tmp_path: Path) -> None:
    """Each way into the llamacpp runtime checks before llama.cpp gets the file, which would refuse this one, too."""
    path = write_gguf(tmp_path / "parts.gguf", *tiny_text_model())
    runtime, options, message = LlamaCpp(), LoadOptions(n_ctx=64), "there is no tensor output_norm.weight"
    assert message in str(runtime.accepts(path))
    for enter in (runtime.plan, runtime.load):
        with pytest.raises(ModelFormatError, match=message):
            enter(path, options)
    assert runtime.accepts(tiny_llama(tmp_path / "sound.gguf")) is None


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf", "gemma3-270m.gguf"])
def test_real_models_are_accepted(name: str) -> None:
    require_consistent(read_gguf(real_model(name)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, tiny in ARCHITECTURES.items() if tiny.n_expert and name != "gemma4-moe"]
)
def test_experts(tmp_path: Path, name: str) -> None:
    """A sound mixture of experts is taken; another number, width or place of experts than the metadata's is not."""
    gguf = read_gguf(write_tiny(tmp_path / "m.gguf", ARCHITECTURES[name]))
    architecture = gguf.metadata["general.architecture"]
    require_consistent(gguf)
    tensor = gguf.tensors["blk.1.ffn_down_exps.weight"]
    n_ff, n_embd, n = tensor.shape
    for shape in ((n_ff, n_embd, n - 1), (n_ff // 2, n_embd, n), (n_ff, n_embd * n)):
        with pytest.raises(ModelFormatError, match=r"blk\.1\.ffn_down_exps\.weight has the shape"):
            require_consistent(changed(gguf, {}, {tensor.name: replace(tensor, shape=shape)}))
    with pytest.raises(ModelFormatError, match=r"no tensor blk\.1\.ffn_gate_inp\.weight"):
        require_consistent(changed(gguf, {}, {"blk.1.ffn_gate_inp.weight": None}))
    with pytest.raises(ModelFormatError, match=f"{n + 1} of {n} experts are used"):
        require_consistent(changed(gguf, {f"{architecture}.expert_used_count": n + 1}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2"])
def test_state_spaces(tmp_path: Path, name: str) -> None:
    """Sizes of mixers that do not divide each other, and those that llama.cpp has other ones of."""
    gguf = read_gguf(write_tiny(tmp_path / "m.gguf", ARCHITECTURES[name]))
    require_consistent(gguf)
    for key in ("inner_size", "time_step_rank", "group_count", "state_size", "conv_kernel"):
        with pytest.raises(ModelFormatError, match=rf"ssm\.{key}"):
            require_consistent(changed(gguf, {f"{name}.ssm.{key}": 0}))
    with pytest.raises(ModelFormatError, match="each of the first two a multiple of the next"):
        require_consistent(changed(gguf, {f"{name}.ssm.time_step_rank": 7}))
    if name in ("granitehybrid", "mamba2"):
        with pytest.raises(ModelFormatError, match="twice the embedding length"):
            require_consistent(changed(gguf, {f"{name}.ssm.inner_size": 1024}))


@pytest.mark.slow
def test_short_convolutions(tmp_path: Path) -> None:
    """Kernels of one column, on which llama.cpp ends the process, and kernels that are no floats of 32 bits."""
    lfm2 = read_gguf(write_tiny(tmp_path / "m.gguf", ARCHITECTURES["lfm2"]))
    require_consistent(lfm2)
    for length in (0, 1, -1):
        with pytest.raises(ModelFormatError, match=r"shortconv\.l_cache"):
            require_consistent(changed(lfm2, {"lfm2.shortconv.l_cache": length}))
    mixture = read_gguf(write_tiny(tmp_path / "e.gguf", ARCHITECTURES["lfm2moe"]))
    require_consistent(mixture)
    with pytest.raises(ModelFormatError, match="it has no experts, expected some in the architecture lfm2moe"):
        require_consistent(changed(mixture, {"lfm2moe.expert_count": 0, "lfm2moe.expert_used_count": 0}))
    kernels = replace(lfm2.tensors["blk.0.shortconv.conv.weight"], type=GGMLType.F16)
    with pytest.raises(ModelFormatError, match=r"shortconv\.conv\.weight is of the type F16, expected F32"):
        require_consistent(changed(lfm2, {}, {"blk.0.shortconv.conv.weight": kernels}))
