"""Adapters in GGUFs and those of PEFT: what is wrong with a file is refused by the name of the tensor.

Logits are those of checkpoints whose weights are changed in float64, and of PEFT itself.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.gguf_writer import Typed
from support.models.hf_checkpoints import TinyHF, hf_logits, safetensors_bytes, write_checkpoint
from support.models.tiny_adapters import tiny_adapter
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.errors import EdgedecError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.file import ValueType, read_gguf
from edgedec.load_options import LoadOptions
from edgedec_export.from_hf import convert
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.weights.adapters import load_adapters
from edgedec_runtimes.weights.peft import CONFIG, WEIGHTS

A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
ONES = np.ones((4, 64), np.float32)
TOKENS = Typed(ValueType.ARRAY, [5], ValueType.UINT32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("adapters") / "base.gguf")


def refusal(base: Path, adapter: Path) -> str:
    with pytest.raises((ModelFormatError, UnsupportedModelError)) as found:
        load_adapters([adapter], read_gguf(base))
    assert str(adapter) in str(found.value)
    return str(found.value)


TENSORS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({B: None}, "'blk.0.attn_q.weight.lora_a' is there without 'blk.0.attn_q.weight.lora_b'"),
    ({A: None}, "'blk.0.attn_q.weight.lora_b' is there without"),
    ({"blk.0.attn_q.weight.lora_c": ONES}, "ends neither with .lora_a nor"),
    ({"x": ONES}, "'x' ends neither"),
    ({A: np.ones((4, 63), np.float32)}, "pair of 'blk.0.attn_q.weight' is for 64 rows and 63 columns"),
    ({B: np.ones((65, 4), np.float32)}, "is for 65 rows and 64 columns"),
    ({A: np.ones((5, 64), np.float32)}, "has the ranks 5 and 4"),
    ({A: np.ones((4097, 64), np.float32), B: np.ones((64, 4097), np.float32)}, "has the ranks 4097"),
    ({A: np.ones(64, np.float32)}, "has the shape (64,), expected a matrix"),
    ({A: np.ones((2, 4, 64), np.float32)}, "expected a matrix"),
    ({A: np.full((4, 64), np.nan, np.float32)}, "'blk.0.attn_q.weight' holds what is no number"),
    ({B: np.full((64, 4), np.inf, np.float16)}, "holds what is no number"),
    ({"blk.7.attn_q.weight.lora_a": ONES, "blk.7.attn_q.weight.lora_b": ONES.T.copy()}, "that base.gguf lacks"),
    (
        {"blk.0.attn_norm.weight.lora_a": ONES, "blk.0.attn_norm.weight.lora_b": ONES},
        "'blk.0.attn_norm.weight' changes",
    ),
    ({"token_embd.weight.lora_a": ONES, "token_embd.weight.lora_b": ONES}, "'token_embd.weight' changes embeddings"),
    ({"output.weight.lora_a": ONES, "output.weight.lora_b": ONES}, "'output.weight' changes embeddings, the output"),
)


@pytest.mark.parametrize(("changed", "message"), TENSORS)
def test_wrong_tensors_are_named(base: Path, tmp_path: Path, changed: Mapping[str, Any], message: str) -> None:
    """Half a pair, unknown names, other shapes and ranks, what is no number, and what can't be changed."""
    assert message in refusal(base, tiny_adapter(tmp_path / "a.gguf", base, changed=changed))


KEYS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"general.type": "model"}, "general.type is 'model'"),
    ({"adapter.type": "control_vector"}, "adapter.type 'control_vector'"),
    ({"general.architecture": "qwen2"}, "an adapter of the architecture 'qwen2', and base.gguf is 'llama'"),
    ({"adapter.alora.invocation_tokens": TOKENS}, "an activated LoRA"),
    ({"adapter.lora.alpha": float("nan")}, "adapter.lora.alpha"),
    ({"adapter.lora.alpha": "8"}, "adapter.lora.alpha"),
)


@pytest.mark.parametrize(("metadata", "message"), KEYS)
def test_other_files_are_refused(base: Path, tmp_path: Path, metadata: Mapping[str, Any], message: str) -> None:
    """Models, other kinds of adapters, those of other architectures, and keys that hold something else."""
    assert message in refusal(base, tiny_adapter(tmp_path / "a.gguf", base, metadata=metadata))


def test_a_file_without_pairs_or_alpha(base: Path, tmp_path: Path) -> None:
    """It changes nothing, or does not say by how much; a model is no adapter."""
    assert "it changes no matrix" in refusal(base, tiny_adapter(tmp_path / "a.gguf", base, matrices=()))
    assert "general.type is None" in refusal(base, base)


def test_alpha_0_stands_for_no_factor(base: Path, tmp_path: Path) -> None:
    """The factor is alpha / rank; with alpha 0 it is 1, as llama.cpp has it."""
    for alpha, factor in ((8.0, 2.0), (0.0, 1.0)):
        (found,) = load_adapters([tiny_adapter(tmp_path / f"{alpha}.gguf", base, alpha=alpha)], read_gguf(base))
        assert {pair.factor for pair in found.pairs.values()} == {factor}


@pytest.mark.slow
def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    """An adapter of a layer's experts is refused, one of its attention is taken."""
    base = write_tiny(tmp_path / "base.gguf", ARCHITECTURES["qwen3moe"])
    pair = {f"blk.0.ffn_up_exps.weight.lora_{x}": np.ones((4, 4), np.float32) for x in "ab"}
    adapter = tiny_adapter(tmp_path / "a.gguf", base, changed=pair)
    assert "'blk.0.ffn_up_exps.weight' changes embeddings, the output matrix, experts" in refusal(base, adapter)
    assert load_adapters([tiny_adapter(tmp_path / "b.gguf", base)], read_gguf(base))


@pytest.mark.slow
def test_damaged_files(base: Path, tmp_path: Path) -> None:
    """Files that are cut, and 300 with bytes changed in the header: an EdgedecError, or a model that computes."""
    path = tiny_adapter(tmp_path / "a.gguf", base, matrices=("attn_q", "ffn_down"))
    raw, rng = path.read_bytes(), np.random.default_rng(3)
    header = raw.index(b"blk.1.ffn_down.weight.lora_b") + 60
    mutants = [raw[:size] for size in (*range(0, header, 97), len(raw) - 1, len(raw) // 2)]
    for _ in range(300):
        changed = bytearray(raw)
        for place in rng.integers(0, header, rng.integers(1, 4)):
            changed[place] = rng.integers(256)
        mutants.append(bytes(changed))
    n_loaded = 0
    for mutant in mutants:
        path.write_bytes(mutant)
        try:
            with Cpu().load(base, LoadOptions(n_ctx=64, n_threads=1, adapters=((path, 1.0),))) as model:
                session = model.session(64)
                session.scales = (1.0,)
                session.forward(np.array([5, 6], np.int32), n_past=0)
                n_loaded += 1
        except EdgedecError:
            continue
    assert n_loaded < len(mutants) // 2


IDS = [5, 9, 200, 31, 7, 7, 90, 12]
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
USUAL: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "modules_to_save": None}
Arrays = dict[str, NDArray[np.float32]]


def arrays(tiny: TinyHF, rank: int = 4) -> Arrays:
    """Return the random matrices of an adapter by the names that PEFT gives them."""
    rng = np.random.default_rng(7)
    n_q, n_kv = tiny.n_head * tiny.head_dim, tiny.n_head_kv * tiny.head_dim
    sizes = ((n_q, tiny.n_embd), (n_kv, tiny.n_embd), (n_kv, tiny.n_embd), (tiny.n_embd, n_q), (tiny.n_ff, tiny.n_embd))
    found: Arrays = {}
    for layer in range(tiny.n_layer):
        for module, (n_rows, n_cols) in zip(MODULES, sizes, strict=True):
            name = f"base_model.model.{tiny.prefix}layers.{layer}.{module}"
            found[f"{name}.lora_A.weight"] = (rng.standard_normal((rank, n_cols)) / n_cols**0.5).astype(np.float32)
            found[f"{name}.lora_B.weight"] = (rng.standard_normal((n_rows, rank)) / 4).astype(np.float32)
    return found


def written(folder: Path, found: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> Path:
    """Write an adapter as PEFT does, and return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(USUAL | dict(config)))
    tensors = {name: ("F32", array.shape, array.tobytes()) for name, array in found.items()}
    (folder / WEIGHTS).write_bytes(safetensors_bytes(tensors))
    return folder


def logits(model: Path, adapter: Path) -> NDArray[np.float32]:
    """Return the logits that the cpu runtime computes with an adapter."""
    with Cpu().load(model, LoadOptions(n_ctx=64, adapters=((adapter, 1.0),))) as loaded:
        session = loaded.session(64)
        session.scales = (1.0,)
        return session.forward(np.array(IDS, np.int32), n_past=0, rows="all").logits.copy()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, NDArray[np.float64]]]:
    """The GGUF of a tiny llama in its folder, beside its checkpoint, and the checkpoint's weights."""
    folder = tmp_path_factory.mktemp("peft")
    weights = write_checkpoint(folder / "hf", TinyHF("llama"))
    return convert(folder / "hf", folder / "llama.gguf"), weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "factors"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"alpha_pattern": {"q_proj": 2}}, (0.5, 2.0)),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 6, "model.layers.1.self_attn.q_proj": 6}}, (1.5, 2.0)),
    ],
)
def test_the_logits_of_changed_weights(
    llama: tuple[Path, Any], tmp_path: Path, config: dict[str, Any], factors: tuple[float, float]
) -> None:
    """Each factor (alpha / r, alpha / sqrt r, and alphas by module), with reordered queries and keys: as float64."""
    (path, weights), tiny = llama, TinyHF("llama")
    found = arrays(tiny)
    changed = dict(weights)
    for name, a in found.items():
        if ".lora_A." in name:
            module = name.removeprefix(f"base_model.model.{tiny.prefix}").removesuffix(".lora_A.weight")
            b = found[name.replace("lora_A", "lora_B")].astype(np.float64)
            changed[f"{module}.weight"] = changed[f"{module}.weight"] + factors["q_proj" not in module] * (b @ a)
    expected = hf_logits(tiny, changed, IDS)
    assert np.abs(expected - hf_logits(tiny, weights, IDS)).max() > 0.5
    np.testing.assert_allclose(logits(path, written(tmp_path / "a", found, config)), expected, rtol=0, atol=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_an_adapter_that_peft_has_made(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """PEFT's own file, with ranks and alphas by pattern and rsLoRA: the logits are those of torch in float32."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path, _ = llama
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent / "hf", dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=2,
        target_modules=["q_proj", "k_proj", "down_proj"],
        rank_pattern={"k_proj": 3},
        alpha_pattern={"layers.1.mlp.down_proj": 5},
        use_rslora=True,
        init_lora_weights=False,
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        expected = adapted(torch.tensor([IDS])).logits[0].numpy()
        with adapted.disable_adapter():
            plain = adapted(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(expected - plain).max() > 0.2
    np.testing.assert_allclose(logits(path, tmp_path / "a"), expected, rtol=0, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3, expected 'LORA'"),
        ({"use_dora": True}, "use_dora is True, expected False"),
        ({"bias": "all"}, "bias is all, expected 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern is"),
        ({"lora_alpha": "x"}, "lora_alpha is x, expected a positive number"),
        ({"lora_alpha": 0}, "lora_alpha is 0, expected a positive number"),
    ],
)
def test_what_is_more_than_a_product_is_refused(
    llama: tuple[Path, Any], tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    """DoRA, biases, whole modules and the like are refused by the name of the setting."""
    folder = written(tmp_path / "a", arrays(TinyHF("llama")), config)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=message.replace("(", r"\(")):
        load_adapters([folder], read_gguf(llama[0]))


OTHERS = ("lm_head", "model.embed_tokens", "model.layers.9.self_attn.q_proj", "model.x", "q" * 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_are_refused_by_name(llama: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    """The output matrix, embeddings, a layer that the model lacks, and unknown names."""
    found = {f"base_model.model.{name}.lora_{x}.weight": np.ones((64, 64), np.float32) for x in "AB"}
    with pytest.raises(EdgedecError, match=r"lm_head|output|token_embd|blk\.9\.attn_q|model\.x|q{80}"):
        load_adapters([written(tmp_path / "a", found, {})], read_gguf(llama[0]))


@pytest.mark.slow
def test_damaged_folders_are_refused(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """A missing file, half a pair, other heads, other shapes, no number, and files that are cut at 50 places."""
    found, gguf = arrays(TinyHF("llama")), read_gguf(llama[0])
    folder = written(tmp_path / "a", found, {})
    raw, first = (folder / WEIGHTS).read_bytes(), next(iter(found))
    other = first.replace("lora_A", "lora_B")
    for changed in (
        {name: array for name, array in found.items() if name != first},
        found | {other: np.ones((63, 4), np.float32)},
        found | {other: np.ones((80, 4), np.float32)},
        found | {first: np.ones((3, 64), np.float32)},
        found | {first: np.full((4, 64), np.nan, np.float32)},
        found | {first: np.ones(64, np.float32)},
        found | {first: np.ones((0, 64), np.float32), other: np.ones((64, 0), np.float32)},
    ):
        with pytest.raises(ModelFormatError, match=r"q_proj|attn_q"):
            load_adapters([written(tmp_path / "b", changed, {})], gguf)
    for size in range(0, len(raw), len(raw) // 50):
        (folder / WEIGHTS).write_bytes(raw[:size])
        with pytest.raises(ModelFormatError):
            load_adapters([folder], gguf)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelNotFoundError):
        load_adapters([folder], gguf)
    with pytest.raises(ModelNotFoundError):
        load_adapters([tmp_path], gguf)
