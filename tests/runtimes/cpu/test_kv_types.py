"""Keys and values of less than 16 bits: what they take, how close they stay, and that drafts change no token.

That bits depend on nothing but the text is tested in test_invariance.py, the kernels in tests/native. Then, layers of
one network that differ in their heads and widths, or lack attention or a feed-forward block.
"""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.models.code_paths import each_architecture
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import ARCHITECTURES, Tiny, tiny_metadata, tiny_tensors, write_tiny
from support.models.tiny_runs import all_logits, distance

import edgedec
from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet
from edgedec_runtimes.cpu import kv_types
from edgedec_runtimes.cpu.kv_types import token_bytes
from edgedec_runtimes.cpu.library import KV_TYPES, instruction_sets, native
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow


TOKENS = np.random.default_rng(1).integers(0, 260, 48).astype(np.int32)
PROMPT = "one two three one two three one two three one"
logits = partial(all_logits, Cpu(), tokens=TOKENS)


def distances(path: Path) -> list[float]:
    """Return how far the logits of the types of less bits are from those of f16, in units of these."""
    expected = logits(path, "f16")
    return [distance(logits(path, kv_type), expected) for kv_type in ("q8_0", "q8_0/q4_0", "gear", "q4_0")]


def with_key_bias(path: Path, architecture: str, size: float) -> Path:
    """Write a tiny model with biases of the keys whose every eighth element is `size`, as Qwen 2.5 has some."""
    tiny = Tiny(architecture=architecture, biases=True)
    tensors = tiny_tensors(tiny)
    for name in tensors:
        if name.endswith("attn_k.bias"):
            values = np.frombuffer(tensors[name].data, np.float32).copy()
            values[::8] = size
            tensors[name] = RawTensor(GGMLType.F32, values.shape, values.tobytes())
    return write_gguf(path, tiny_metadata(tiny), tensors)


KEYS = [name for name in ARCHITECTURES if name != "mamba2"]
"""Those of which any layer has keys."""
KEYS_ALONE = [name for name, tiny in ARCHITECTURES.items() if not (tiny.convolutions or tiny.recurrent or tiny.parts)]
"""Those of which a saved session holds keys and values only."""


@pytest.mark.parametrize("name", each_architecture(KEYS_ALONE))
def test_the_plan_is_what_pages_take(tmp_path: Path, name: str) -> None:
    """The term of the plan, the count by token and the native library agree, in whole pages of 64 tokens."""
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES[name])
    for kv_type in KV_TYPES:
        options = LoadOptions(n_ctx=100, n_parallel=2, kv_type=kv_type, n_threads=1)
        planned = {term.name: term.n_bytes for term in Cpu().plan(path, options)}["KV cache"]
        assert planned == 2 * 128 * token_bytes(read_network(read_gguf(path)), kv_type)
        with Cpu().load(path, options) as model:
            assert isinstance(model, CpuModel)
            assert native().ec_session_saved_bytes(model.session(128).handle, 128) == planned // 2


def test_bytes_of_a_token(tmp_path: Path) -> None:
    """2 layers, 2 heads of 64, keys and values: 16, 8.5, 6.5, 6 and 4.5 bits; with biases 64 floats for rotation."""
    paths = [write_tiny(tmp_path / f"{biases}.gguf", Tiny(biases=biases)) for biases in (False, True)]
    plain, biased = (read_network(read_gguf(path)) for path in paths)
    assert plain.n_layer * plain.n_head_kv * plain.head_dim == 256
    expected = {"f16": 1024, "q8_0": 544, "q8_0/q4_0": 416, "gear": 384, "q4_0": 288}
    assert {kv_type: token_bytes(plain, kv_type) for kv_type in expected} == expected
    assert [token_bytes(biased, kv_type) - expected[kv_type] for kv_type in expected] == [0, 256, 256, 256, 256]


@pytest.mark.parametrize("name", each_architecture(KEYS))
def test_more_bits_are_closer(tmp_path: Path, name: str) -> None:
    """All stay near what f16 gives, q8_0 nearest, q4_0 least near, and all do round."""
    q8_0, mixed, gear, q4_0 = distances(write_tiny(tmp_path / "m.gguf", ARCHITECTURES[name]))
    nearest, least = (0.1, 0.5) if ARCHITECTURES[name].n_expert else (0.03, 0.35)  # rows may go to other experts
    assert 1e-4 < q8_0 < nearest
    assert q8_0 < min(mixed, gear) <= max(mixed, gear) < q4_0 < least


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_large_biases_of_keys_cost_nothing(tmp_path: Path, architecture: str) -> None:
    """Biases of 100 in some elements, which would fill the range of their groups, do no more harm than none."""
    large = with_key_bias(tmp_path / "large.gguf", architecture, 100.0)
    for found, bound in zip(distances(large), (0.05, 0.3, 0.4, 0.5), strict=True):
        assert found < bound


def test_instruction_sets_agree(tmp_path: Path) -> None:
    """They differ in the last bits, and by the few elements that those round to the neighbouring step."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(n_layer=1))
    for kv_type in list(KV_TYPES)[1:]:
        found = []
        for name in instruction_sets():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("EDGEDEC_CPU_ISA", name)
                found.append(logits(path, kv_type))
        for one, other in itertools.pairwise(found):
            assert float(np.abs(one - other).max()) < 0.02 * float(one.std())


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_drafts_change_no_token(tmp_path: Path, kv_type: str, architecture: str) -> None:
    """Greedy and sampled, the text with drafts of a suffix automaton and of a table is that of plain decoding."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(architecture=architecture))
    texts = []
    for draft in ("off", "suffix", "suffix+recycling"):
        with edgedec.load(path, runtime="cpu", draft=draft, kv_type=kv_type, n_ctx=256, offline=True) as engine:
            results = [
                engine.generate(PROMPT, max_tokens=80, ignore_end=True, temperature=temperature, seed=3)
                for temperature in (0.0, 0.7)
            ]
        assert draft == "off" or any(result.stats.n_drafts for result in results)
        texts.append([result.token_ids for result in results])
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


SHAPE_TOKENS = np.random.default_rng(4).integers(0, 260, 80).astype(np.int32)
FIRST, SECOND = Tiny(n_head=8, n_head_kv=4, head_dim=32), Tiny(n_head=8, n_head_kv=2, head_dim=32, n_ff=512)


shape_logits = partial(all_logits, tokens=SHAPE_TOKENS, n_threads=2)


def tensors_of(first: Tiny, second: Tiny) -> dict[str, RawTensor]:
    """Return the tensors of a model whose layers are the first ones of two others."""
    others = tiny_tensors(replace(second, seed=1))
    moved = {name.replace("blk.0.", "blk.1."): tensor for name, tensor in others.items() if name.startswith("blk.0.")}
    return {**tiny_tensors(first), **moved}


def written(folder: Path, name: str, tensors: dict[str, RawTensor], n_head_kv: list[int], n_ff: list[int]) -> Path:
    """Write a llama of two layers with these key-value heads and widths, and return its path."""
    arrays = {"attention.head_count_kv": np.array(n_head_kv, np.int32), "feed_forward_length": np.array(n_ff, np.int32)}
    keys = {f"llama.{key}": value for key, value in arrays.items()}
    return write_gguf(folder / f"{name}.gguf", tiny_metadata(FIRST) | keys, tensors)


def test_heads_and_widths_by_layer(tmp_path: Path) -> None:
    """Logits are those of the reference, with every type of keys and values, of which each layer has its own number."""
    path = written(tmp_path, "m", tensors_of(FIRST, SECOND), [4, 2], [256, 512])
    network = read_network(read_gguf(path))
    assert [(shape.n_head_kv, shape.n_ff) for shape in network.layers] == [(4, 256), (2, 512)]
    assert kv_types.token_bytes(network, "f16") == 2 * 2 * 32 * (4 + 2)
    expected = shape_logits(Reference(), path)
    for kv_type, bound in {"f16": 2e-4, "q8_0": 0.03, "q8_0/q4_0": 0.2, "gear": 0.3, "q4_0": 0.3}.items():
        found = shape_logits(Cpu(), path, kv_type)
        assert distance(found, expected) < bound


def test_a_layer_without_one_of_its_halves(tmp_path: Path) -> None:
    """The bits are those of a half that adds zeros."""
    tensors = tensors_of(FIRST, SECOND)

    def without(*prefixes: str) -> dict[str, RawTensor]:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}

    def zeroed(name: str) -> dict[str, RawTensor]:
        tensor = tensors[name]
        return tensors | {name: RawTensor(tensor.type, tensor.shape, bytes(len(tensor.data)))}

    halves = {
        "attention": (without("blk.1.attn_"), [4, 0], [256, 512], zeroed("blk.1.attn_output.weight")),
        "block": (without("blk.1.ffn_"), [4, 2], [256, 0], zeroed("blk.1.ffn_down.weight")),
    }
    for name, (fewer, n_head_kv, n_ff, zeros) in halves.items():
        found = written(tmp_path, name, fewer, n_head_kv, n_ff)
        expected = written(tmp_path, f"{name}-zero", zeros, [4, 2], [256, 512])
        for runtime in (Cpu(), Reference()):
            np.testing.assert_array_equal(shape_logits(runtime, found), shape_logits(runtime, expected))


def test_one_number_for_all_layers_is_refused_by_name(tmp_path: Path) -> None:
    """What takes only layers of one shape says what they differ in."""
    network = read_network(read_gguf(written(tmp_path, "m", tensors_of(FIRST, SECOND), [4, 2], [256, 512])))
    assert (network.n_head, network.head_dim) == (8, 32)
    with pytest.raises(UnsupportedModelError, match="differ in n_head_kv, which is from 2 to 4"):
        _ = network.n_head_kv
    with pytest.raises(UnsupportedModelError, match="differ in n_ff, which is from 256 to 512"):
        _ = network.n_ff


def test_heads_that_contradict_each_other(tmp_path: Path) -> None:
    """The message names the layer."""
    path = written(tmp_path, "m", tensors_of(FIRST, SECOND), [4, 3], [256, 512])
    with pytest.raises(ModelFormatError, match="layer 1 has 8 heads on 3 key-value heads"):
        read_network(read_gguf(path))


def test_layers_that_read_the_keys_of_others(tmp_path: Path) -> None:
    """They take no memory for keys and values, and leaving their source out leaves out their attention."""
    tiny = ARCHITECTURES["gemma4"]
    network = read_network(read_gguf(write_gguf(tmp_path / "m.gguf", tiny_metadata(tiny), tiny_tensors(tiny))))
    assert [shape.kv_from for shape in network.layers] == [0, 1, 2, 1, 1, 2]
    assert kv_types.token_bytes(network, "f16") == 2 * 2 * 2 * (64 + 64 + 128)
    source, readers = np.ones((6, 2), np.bool_), np.ones((6, 2), np.bool_)
    source[1, 0] = readers[[1, 3, 4], 0] = False
    for runtime in (Cpu(), Reference()):
        with runtime.load(tmp_path / "m.gguf", LoadOptions(n_ctx=64)) as model:
            sets = [LayerSet(*mask.T.copy()) for mask in (source, readers, np.ones((6, 2), np.bool_))]
            found = [
                model.session(64).forward(SHAPE_TOKENS[:9], n_past=0, layers=layers, rows="all").logits.copy()
                for layers in sets
            ]
        np.testing.assert_array_equal(found[0], found[1])
        assert (found[0] != found[2]).any()
