"""A nextn layer on the cpu runtime: its scores are those of plain formulas, what it holds, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.followed import EXPERTS, NEXTN_FLOATS, NEXTN_INTEGERS, fresh, head_of, read, scores
from support.heads.followed import nextn as loaded
from support.heads.loaded_blocks import TEXT
from support.heads.tiny_nextn import OWN, PlainNextn, nextn_metadata, nextn_tensors, write_nextn
from support.models.gguf_writer import write_gguf
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import ARCHITECTURES, Tiny, tiny_metadata, write_tiny

from edgedec.errors import EdgedecError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads import nextn
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit

pytestmark = pytest.mark.slow

LLAMA = Tiny("llama", n_layer=2, n_embd=48, n_head=3, n_head_kv=1, head_dim=32, n_ff=64, tied=True, biases=True)


KINDS = {
    "qwen3": (NEXTN_FLOATS, OWN[:1]),
    "the model's norm": (NEXTN_FLOATS, ()),
    "matrices of its own": (NEXTN_FLOATS, OWN),
    "experts": (EXPERTS, OWN[:1]),
    "biases, tied": (LLAMA, OWN[:1]),
    "qwen35": (ARCHITECTURES["qwen35"], OWN[:1]),
    "qwen35moe": (ARCHITECTURES["qwen35moe"], OWN[:1]),
    "qwen3next": (ARCHITECTURES["qwen3next"], ()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_plain_formulas(kind: str, tmp_path: Path) -> None:
    """Of float weights but for the matrix that joins pairs, scores are within 3 % of the largest score."""
    tiny, own = KINDS[kind]
    n = 30
    with loaded(tmp_path, tiny, own) as model:
        session = model.session(200)
        last = tiny.n_layer - 1
        states = session.forward(TEXT[:n], n_past=0, taps=(last,)).hidden[last].copy()
        found = scores(session, n, 4)
    drafted = [int(row.argmax()) for row in found[:-1]]
    expected = PlainNextn(tmp_path, tiny, own).scores(states, TEXT[: n + 1].tolist(), drafted)
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_threads_change_no_bit(n_threads: int, tmp_path: Path) -> None:
    """One thread, two and three give the same scores."""
    with loaded(tmp_path, NEXTN_INTEGERS, n_threads=2) as model:
        expected = fresh(model, 60)
    with loaded(tmp_path, NEXTN_INTEGERS, n_threads=n_threads) as model:
        assert np.array_equal(fresh(model, 60), expected)


def test_a_large_vocabulary_is_drafted_by_its_first_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores are the first ones of those over all tokens, with and without an output matrix of its own."""
    n = 30
    for own in (OWN[:1], OWN):
        with loaded(tmp_path, own=own) as model:
            expected = fresh(model, n)[0]
        with monkeypatch.context() as patched:
            patched.setattr(nextn, "n_listed", lambda gguf, n_vocab: 96)
            with loaded(tmp_path, own=own) as model:
                session = model.session(200)
                read(session, 0, n)
                assert head_of(session).token_ids.tolist() == list(range(96))
                assert np.array_equal(scores(session, n)[0], expected[:96])


def test_no_second_copy_of_the_models_matrices_is_held(tmp_path: Path) -> None:
    """The head holds the layer and the matrix that joins pairs; a copy of output rows is held where weights stream."""
    path = write_nextn(tmp_path / "m.gguf", NEXTN_INTEGERS)
    tensors = read_gguf(path).tensors
    own = sum(t.n_bytes for name, t in tensors.items() if name.startswith("blk.2.") and len(t.shape) == 2)
    names = ("draft head", "KV cache of the draft head", "taps of the draft head", "activations of the draft head")
    for resident in (None, layer_bytes(path).total // 2):
        options = LoadOptions(
            n_ctx=256, draft_head=path, resident_bytes=resident, cache_dir=tmp_path / "cache", n_threads=1
        )
        planned = {term.name: term.n_bytes for term in Cpu().plan(path, options) if term.name in names}
        with Cpu().load(path, options) as model:
            held = {term.name: term.n_bytes for term in model.memory(256, options.max_rows) if term.name in names}
            session = model.session(200)
            read(session, 0, 30)
            row = scores(session, 30)[0]
        assert planned == held
        assert planned["KV cache of the draft head"] == 256 * 2 * 2 * 64 * 2
        copied = N_VOCAB * 256 * 18 // 32 if resident else 0
        assert own / 2 < planned["draft head"] - copied < 1.1 * own
        assert np.isfinite(row).all()


def test_the_file_of_a_layer_alone_is_a_head(tmp_path: Path) -> None:
    """It drafts what the layer in the model's file drafts, and does not fit a model of another depth."""
    model_path = write_nextn(tmp_path / "m.gguf", NEXTN_FLOATS)
    alone = write_nextn(tmp_path / "nextn.gguf", NEXTN_FLOATS, alone=True)
    of_model = {name: tensor for name, tensor in nextn_tensors(NEXTN_FLOATS).items() if not name.startswith("blk.3.")}
    plain = write_gguf(tmp_path / "plain.gguf", tiny_metadata(NEXTN_FLOATS), of_model)
    found = []
    for path, head in ((model_path, model_path), (model_path, alone), (plain, alone), (plain, model_path)):
        with Cpu().load(path, LoadOptions(n_ctx=320, draft_head=head)) as model:
            found.append(fresh(model, 40))
    assert all(np.array_equal(rows, found[0]) for rows in found[1:])
    deeper = write_tiny(tmp_path / "deeper.gguf", replace(NEXTN_FLOATS, n_layer=4))
    with pytest.raises(UnsupportedModelError, match="it reads what leaves layer 3, but the model has 4 layers"):
        fit(load_head(alone), read_gguf(deeper))


@pytest.mark.parametrize("change", ["absent", "a row more", "no number"])
def test_damaged_tensors_are_refused_by_name(change: str, tmp_path: Path) -> None:
    """Every tensor of the layer that is absent, has another shape or is no number, is named before anything drafts."""
    tensors, prefix = nextn_tensors(NEXTN_FLOATS), "blk.3."
    own = {"joint": "nextn.eh_proj", "input_norm": "nextn.enorm", "hidden_norm": "nextn.hnorm"}
    parts = {short: part for part, short in own.items()} | {"nextn.shared_head_norm": "output_norm"}
    for name in [name for name in tensors if name.startswith(prefix)]:
        changed: dict[str, Any] = dict(tensors)
        short, tensor = name.removeprefix(prefix).removesuffix(".weight"), changed.pop(name)
        is_vector = len(tensor.shape) == 1
        if change == "a row more":
            changed[name] = np.zeros((tensor.shape[-1] + 1, *tensor.shape[:-1]), np.float32)
        if change == "no number":
            if not (is_vector or short in parts):
                continue
            changed[name] = np.full(tensor.shape[::-1], np.nan, np.float32)
        if change == "absent" and short in ("nextn.shared_head_norm", "attn_q_norm", "attn_k_norm"):
            continue  # the model's own norm stands in place of the first, and the others may be absent
        path = write_gguf(tmp_path / "m.gguf", nextn_metadata(NEXTN_FLOATS), changed)
        with pytest.raises(EdgedecError) as caught:
            Cpu().load(path, LoadOptions(n_ctx=64, draft_head=path))
        assert parts.get(short, short) in str(caught.value) or short in str(caught.value)


def test_the_price_counts_what_a_drafted_token_reads(tmp_path: Path) -> None:
    """A token reads the layer, the matrix that joins pairs and the output matrix; of experts, those it goes through."""
    with loaded(tmp_path, NEXTN_INTEGERS) as model:
        session = model.session(64)
        tensors = read_gguf(tmp_path / "m.gguf").tensors
        of_layer = {name: t for name, t in tensors.items() if name.startswith("blk.2.") and len(t.shape) == 2}
        joint = of_layer.pop("blk.2.nextn.eh_proj.weight")
        n_bytes = sum(t.n_bytes for t in of_layer.values()) + joint.n_elements * 34 // 32
        expected = (n_bytes + tensors["token_embd.weight"].n_bytes) / layer_bytes(tmp_path / "m.gguf").total
        assert head_of(session).price.level == pytest.approx(expected, rel=0.01)  # tiles have whole groups of rows
    prices = []
    for n_used in (2, 4):
        tiny = replace(EXPERTS, n_expert_used=n_used)
        with loaded(tmp_path, tiny) as model:
            prices.append(head_of(model.session(64)).price.level * layer_bytes(tmp_path / "m.gguf").total)
    assert prices[1] - prices[0] == pytest.approx(2 * 3 * 48 * 32 * 4)
