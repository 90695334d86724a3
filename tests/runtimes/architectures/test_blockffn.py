"""BlockFFN: logits against a forward in float64 that shares no code, rows with a single step's bits, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import OWN, tiny_metadata, tiny_tensors

from edgedec.errors import EdgedecError, ModelFormatError
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow

TINY = OWN["blockffn"]
TOKENS = np.random.default_rng(5).integers(0, 260, 24).astype(np.int32)
F64 = NDArray[np.float64]
Change = Callable[[dict[str, RawTensor]], dict[str, RawTensor]]


def write(path: Path, change: Change = dict, **metadata: Any) -> Path:
    """Write the tiny model with other tensors or keys, and return its path."""
    keys = {f"blockffn.{name}": value for name, value in metadata.items()}
    return write_gguf(path, tiny_metadata(TINY) | keys, change(tiny_tensors(TINY)))


def silent(tensors: dict[str, RawTensor]) -> dict[str, RawTensor]:
    """Return the tensors with a router in the first layer that scores every expert below 0, or as 0."""
    name = "blk.0.ffn_gate_inp.weight"
    return tensors | {name: replace(tensors[name], data=bytes(len(tensors[name].data)))}


def logits_of(tensors: dict[str, RawTensor]) -> tuple[F64, list[int]]:
    """Return the logits behind each of TOKENS, f64[n, n_vocab], and how many experts a row has on average, by layer."""
    w = {
        name: np.frombuffer(tensor.data, np.float32).astype(np.float64).reshape(tensor.shape[::-1])
        for name, tensor in tensors.items()
    }

    def norm(x: F64, weight: F64) -> F64:
        return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight)

    def turned(x: F64) -> F64:
        angles = np.arange(len(x))[:, None] * 100000.0 ** (-np.arange(TINY.head_dim // 2) / (TINY.head_dim // 2))
        pairs = x.reshape(len(x), -1, TINY.head_dim // 2, 2)
        complexes = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
        return np.stack([complexes.real, complexes.imag], axis=-1).reshape(x.shape[0], -1, TINY.head_dim)

    x, n, counts = w["token_embd.weight"][TOKENS] * 3.0, len(TOKENS), list[int]()
    for i in range(TINY.n_layer):
        layer = {name.removeprefix(f"blk.{i}."): value for name, value in w.items() if name.startswith(f"blk.{i}.")}
        read = norm(x, layer["attn_norm.weight"])
        q, k = turned(read @ layer["attn_q.weight"].T), turned(read @ layer["attn_k.weight"].T)
        v = (read @ layer["attn_v.weight"].T).reshape(n, -1, TINY.head_dim)
        k, v = (np.repeat(each, TINY.n_head // TINY.n_head_kv, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / TINY.head_dim**0.5 + np.triu(np.full((n, n), -np.inf), 1)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        seen = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v).reshape(n, -1)
        x = x + 0.7 * (seen @ layer["attn_output.weight"].T)
        read = norm(x, layer["ffn_norm.weight"])
        shares = np.maximum(read @ layer["ffn_gate_inp.weight"].T, 0)
        counts.append(int((shares > 0).sum()))
        shares = norm(shares, layer["ffn_gate_inp_norm.weight"])
        up = np.einsum("nd,efd->nef", read, layer["ffn_up_exps.weight"])
        up = up / (1 + np.exp(-up)) * shares[:, :, None]
        x = x + 0.7 * np.einsum("nef,edf->nd", up, layer["ffn_down_exps.weight"])
    return norm(x, w["output_norm.weight"]) @ w["output.weight"].T / 8.0, counts


def steps(model: Model) -> NDArray[np.float32]:
    """Return the logits behind each of TOKENS, of single steps."""
    session = model.session(64)
    return np.concatenate([session.forward(TOKENS[i : i + 1], n_past=i).logits.copy() for i in range(len(TOKENS))])


@pytest.mark.parametrize("change", [dict, silent], ids=["some", "none"])
def test_logits_are_those_of_the_formula(tmp_path: Path, change: Change) -> None:
    """A row has the bits of a single step, whichever experts other rows go through; a row may go through none."""
    path, (expected, counts) = write(tmp_path / "m.gguf", change), logits_of(change(tiny_tensors(TINY)))
    assert (counts[0] == 0) == (change is silent)
    assert 2 * len(TOKENS) < counts[1] < (TINY.n_expert - 2) * len(TOKENS)
    with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=2)) as model:
        single, together = steps(model), model.session(64).forward(TOKENS, n_past=0, rows="all").logits
        assert np.array_equal(single.view(np.uint32), together.view(np.uint32))
    with Reference().load(path, LoadOptions(n_ctx=64)) as model:
        plain = model.session(64).forward(TOKENS, n_past=0, rows="all").logits
    for logits in (single, plain):
        assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.0025 * np.sqrt(np.mean(expected**2))


def test_rows_share_the_union_of_their_experts(tmp_path: Path) -> None:
    """An expert is read once for all rows of a forward that go through it."""
    expected = logits_of(tiny_tensors(TINY))[1]
    with Cpu().load(write(tmp_path / "m.gguf"), LoadOptions(n_ctx=64, n_threads=1)) as model:
        steps(model)
        model.session(64).forward(TOKENS, n_past=0, rows="all")
        assert isinstance(model, CpuModel)
        touched = model.experts_touched()
        assert touched[1] == pytest.approx(sum(expected) / len(TOKENS) / TINY.n_layer, abs=0.2)
        assert touched[1] < touched[len(TOKENS)] <= TINY.n_expert


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A fixed number of experts is not BlockFFN's; a layer without the router's norm is none of it."""
    path = write(tmp_path / "m.gguf", expert_used_count=4)
    with pytest.raises(ModelFormatError, match=r"expert_used_count is 4 of 12 experts, expected all"):
        Cpu().load(path, LoadOptions(n_ctx=64))
    path = write(tmp_path / "n.gguf", lambda tensors: {k: t for k, t in tensors.items() if "gate_inp_norm" not in k})
    with pytest.raises(EdgedecError, match=r"blk\.0\.ffn_(down_exps\.scale|gate_inp_norm)"):
        Cpu().load(path, LoadOptions(n_ctx=64))
