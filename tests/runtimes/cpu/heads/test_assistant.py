"""Gemma 4's assistants on the cpu runtime: their scores, that texts stay the same, and what is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.followed import assisted, fresh, head_of, read, scores
from support.heads.llama_head import LlamaHead, LlamaNextn
from support.heads.loaded_blocks import TEXT
from support.heads.tiny_assistant import (
    FLOATS,
    INTEGERS,
    OF_FLOATS,
    OF_INTEGERS,
    AssistantTruth,
    assistant,
    write_assistant,
)
from support.heads.tiny_rows import check_texts
from support.models.gguf_writer import write_gguf
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.errors import EdgedecError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.head_kinds import kind_of
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.draft_head import weights
from edgedec_runtimes.cpu.draft_head.beside import tapped_layers
from edgedec_runtimes.cpu.library import address, native
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads import gguf_assistant
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit

pytestmark = pytest.mark.slow
KEY = "gemma4-assistant"


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a head's matrices of floats as they are."""
    monkeypatch.setattr(weights, "_stored_type", lambda name, type, n_cols, borrowed: type)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("n", [1, 7, 30, 64, 129])
def test_scores_are_those_of_float64(n: int, tmp_path: Path) -> None:
    """Behind texts within the window and beyond, that end with a page and not: five steps of a draft."""
    with assisted(tmp_path) as model:
        session = model.session(320)
        read(session, 0, n)
        actual = scores(session, n, 5)
    drafted = [int(row.argmax()) for row in actual[:-1]]
    truth = AssistantTruth.of(tmp_path / "m.gguf", tmp_path / "assistant.gguf", FLOATS, OF_FLOATS)
    expected = truth.scores(TEXT[: n + 1].tolist(), drafted)
    assert np.abs(actual - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.usefixtures("unrounded")
@pytest.mark.skipif(not LlamaHead.available(), reason="the library has no names as gcc gives them")
def test_scores_are_llama_cpps(tmp_path: Path) -> None:
    """Of the states that llama.cpp gives, over four steps at one position."""
    n = 30
    with assisted(tmp_path) as model:
        session = model.session(320)
        read(session, 0, n)
        actual = scores(session, n, 4)
    tokens = [int(TEXT[n]), *(int(row.argmax()) for row in actual[:-1])]
    with LlamaNextn(tmp_path / "m.gguf", assistant=tmp_path / "assistant.gguf") as theirs:
        state = theirs.states(TEXT[:n].tolist())[-1]
        for token, row in zip(tokens, actual, strict=True):
            expected, state = theirs.step(token, state, n)
            assert np.abs(row - expected).max() < 5e-3 * np.abs(expected).max()


def test_branches_of_a_tree_are_drafted_as_chains(tmp_path: Path) -> None:
    """Each node of a tree has the scores of the chain that leads to it, whatever else is in the tree."""
    with assisted(tmp_path, INTEGERS, OF_INTEGERS) as model:
        session, n = model.session(320), 40
        read(session, 0, n)
        head = head_of(session)
        expected = []
        for path in ((5,), (9,), (5, 9), (9, 5), (5, 9, 7)):
            head.begin(n, int(TEXT[n]))
            rows = [head.next(token) for token in path]
            expected.append(np.copy(rows[-1]))  # type: ignore[arg-type]
        head.begin(n, int(TEXT[n]))
        first = head.branches([5, 9], [-1, -1], 2)
        assert first is not None
        second = head.branches([5, 9, 9, 5], [-1, -1, 0, 1], 2)
        assert second is not None
        third = head.branches([5, 9, 9, 5, 7], [-1, -1, 0, 1, 2], 1)
        assert third is not None
    assert np.array_equal(np.concatenate([first, second, third]), expected)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "more",
    [{}, {"kv_type": "q8_0"}, {"kv_type": "q4_0"}, {"n_parallel": 2}, {"n_threads": 1}],
    ids=["", "q8_0", "q4_0", "parallel", "one thread"],
)
def test_texts_are_those_of_plain_decoding(sampling: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    """Greedy and drawn, with packed keys and values, and with texts side by side."""
    model = write_tiny(tmp_path / "m.gguf", INTEGERS)
    head = write_assistant(tmp_path / "h.gguf", OF_INTEGERS, INTEGERS.n_embd)
    check_texts(model, head, sampling, more)


class _Even(Tiny):
    """A model whose last layers are as wide as the others."""

    def width(self, layer: int) -> int:
        """Return the width of a layer's feed-forward block."""
        return self.n_ff


def test_a_prompt_leaves_out_layers_as_without_a_head(tmp_path: Path) -> None:
    """Of a prompt's 40 rows, only the last one runs the layers that read keys of others; that row's state is enough."""
    tiny = _Even("gemma4", n_layer=6, head_dim=128, narrow=64, n_shared=3, n_expert=8, n_expert_used=4, tied=True)
    with assisted(tmp_path, tiny, replace(OF_INTEGERS, types=("F32",))) as model:
        assert isinstance(model, CpuModel)
        session, counts = model.session(320), np.zeros((2, 257), np.uint64)
        read(session, 0, 40)
        native().ec_model_experts(model.handle, address(counts[0]), address(counts[1]))
        assert {n: int(layers) for n, layers in enumerate(counts[0]) if layers} == {1: 4, 40: 2}
        expected, pieces = scores(session, 40), model.session(320)
        for begin, end in ((0, 17), (17, 39), (39, 40)):
            read(pieces, begin, end)
        assert np.array_equal(scores(pieces, 40), expected)
        assert head_of(session).read_s == 0


def test_the_plan_has_no_keys_of_the_head(tmp_path: Path) -> None:
    """Weights and states alone, in the plan as when they are loaded."""
    path = write_tiny(tmp_path / "m.gguf", INTEGERS)
    head = write_assistant(tmp_path / "h.gguf", OF_INTEGERS, INTEGERS.n_embd)
    options = LoadOptions(n_ctx=256, draft_head=head, cache_dir=None)
    planned = {term.name: term.n_bytes for term in Cpu().plan(path, options) if "draft head" in term.name}
    with Cpu().load(path, options) as model:
        held = {term.name: term.n_bytes for term in model.memory(256, options.max_rows) if "draft head" in term.name}
    assert planned == held
    assert planned.keys() == {"draft head", "taps of the draft head", "activations of the draft head"}
    own = sum(tensor.n_bytes for tensor in read_gguf(head).tensors.values() if len(tensor.shape) == 2)
    assert own / 2 < planned["draft head"] < 1.1 * own


def test_a_large_vocabulary_is_drafted_by_its_first_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with assisted(tmp_path) as model:
        expected = fresh(model, 30)[0]
    monkeypatch.setattr(gguf_assistant, "n_listed", lambda gguf, n_vocab: 96)
    with assisted(tmp_path) as model:
        assert np.array_equal(fresh(model, 30)[0], expected[:96])


TARGETS: dict[str, Tiny] = {
    "its taps have 80 numbers, but the model's hidden states 96": replace(FLOATS, n_embd=96),
    "layer 0 sees keys of 1 x 16 numbers, but the model's layers with a window have 1 x 32": replace(FLOATS, narrow=32),
    "layer 0 sees keys of 1 x 16 numbers, but the model's layers with a window have 2 x 16": replace(
        FLOATS, n_head_kv=2
    ),
    "layer 3 sees keys of 1 x 32 numbers, but the model's layers without a window have 1 x 64": replace(
        FLOATS, head_dim=64
    ),
    "its layer 3 is one without a window, but the model has none": replace(FLOATS, whole=9),
    f"it was trained for {N_VOCAB} tokens, but the model has {N_VOCAB + 5}": replace(FLOATS, n_vocab=N_VOCAB + 5),
    "see keys and values of a gemma4, but the model is a llama": Tiny(n_embd=80, head_dim=16),
}


@pytest.mark.parametrize("words", TARGETS)
def test_models_that_do_not_fit_are_refused_by_name(words: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", TARGETS[words])
    head = write_assistant(tmp_path / "h.gguf")
    with pytest.raises(UnsupportedModelError, match=words):
        fit(load_head(head), read_gguf(path))
    with pytest.raises(EdgedecError, match=words):
        Cpu().load(path, LoadOptions(n_ctx=64, draft_head=head))


@pytest.mark.parametrize("change", ["absent", "a row more", "no number"])
def test_damaged_tensors_are_refused_by_name(change: str, tmp_path: Path) -> None:
    """Every tensor that is absent, has another shape or is no number, before anything drafts."""
    path, (keys, tensors) = write_tiny(tmp_path / "m.gguf", FLOATS), assistant(OF_FLOATS, FLOATS.n_embd)
    shorts = {name: part for part, name in gguf_assistant.TENSORS.items()}
    for name, tensor in tensors.items():
        changed: dict[str, Any] = dict(tensors)
        changed.pop(name)
        if change == "a row more":
            changed[name] = np.zeros((tensor.shape[-1] + 1, *tensor.shape[:-1]), np.float32)
        if change == "no number":
            if len(tensor.shape) > 1 and name not in shorts:
                continue
            changed[name] = np.full(tensor.shape[::-1], np.nan, np.float32)
        if change == "absent" and name.endswith(("attn_q_norm.weight", "layer_output_scale.weight")):
            continue  # a network may lack them
        head = write_gguf(tmp_path / "h.gguf", keys, changed)
        with pytest.raises(EdgedecError) as caught:
            Cpu().load(path, LoadOptions(n_ctx=64, draft_head=head))
        words = (name, shorts.get(name, name), *(["trained for 261 tokens"] if "token_embd" in name else []))
        assert any(word in str(caught.value) for word in words), name


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("embedding_length_out", None, "has no gemma4-assistant.embedding_length_out"),
        ("attention.clamp", 1.0, "does not know 'gemma4.attention.clamp'"),
        ("attention.sliding_window", 1, "sliding_window is 1, which leaves nothing to see"),
        ("attention.value_length_swa", 32, "keys and values of a layer's window differ in length"),
        ("block_count", 5, "head_count_kv"),
    ],
)
def test_settings_are_refused_by_name(key: str, value: float | None, words: str, tmp_path: Path) -> None:
    path, (keys, tensors) = write_tiny(tmp_path / "m.gguf", FLOATS), assistant(OF_FLOATS, FLOATS.n_embd)
    changed = {name: old for name, old in (keys | {f"{KEY}.{key}": value}).items() if old is not None}
    head = write_gguf(tmp_path / "h.gguf", changed, tensors)
    with pytest.raises(EdgedecError, match=words):
        Cpu().load(path, LoadOptions(n_ctx=64, draft_head=head))


def test_what_the_graph_does_not_read_changes_nothing(tmp_path: Path) -> None:
    """The clusters of tokens that transformers looks up, a softcap, and keys of layers that have none."""
    keys, tensors = assistant(OF_FLOATS, FLOATS.n_embd)
    model = write_tiny(tmp_path / "m.gguf", FLOATS)
    beside: dict[str, Any] = {"masked_embd_centroids.weight": np.ones((8, 48), np.float32)}
    beside |= {"masked_embd_ordering": np.arange(N_VOCAB, dtype=np.int64)}
    other = keys | {f"{KEY}.final_logit_softcapping": 30.0, f"{KEY}.embedding_length_per_layer_input": 16}
    rows = []
    for changed, added in ((keys, {}), (other, beside)):
        head = write_gguf(tmp_path / "h.gguf", changed, {**tensors, **added})
        with Cpu().load(model, LoadOptions(n_ctx=320, draft_head=head)) as loaded:
            rows.append(fresh(loaded, 20))
    assert np.array_equal(rows[0], rows[1])


def test_it_is_a_head_and_not_a_model(tmp_path: Path) -> None:
    """`info` describes it; as a model, and on a runtime that keeps its own keys and values, it is refused."""
    head = write_assistant(tmp_path / "h.gguf")
    kind = kind_of(head)
    assert kind is not None
    facts = dict(kind.describe(head).rows)
    assert "assistant" in facts["kind"]
    assert facts["taps"] == "the target's keys and values, and what leaves its last norm"
    with pytest.raises(UnsupportedModelError, match="a draft head, which works only on top of its own target"):
        Cpu().load(head, LoadOptions(n_ctx=64))
    with pytest.raises(UnsupportedModelError, match="which only the cpu runtime shows it"):
        tapped_layers(load_head(head).card)
