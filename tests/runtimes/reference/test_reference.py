"""The reference runtime: llama.cpp's logits, the same bits however a forward is put together, and honest refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.forwards import evaluated
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_models import BOS, EOS, N_VOCAB, SPACE, byte_ids, tiny_llama

from edgedec.errors import (
    CancelledError,
    CapabilityError,
    ModelFormatError,
    RequestError,
    SessionError,
    UnsupportedModelError,
)
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, LayerSet, Model, RowGroup, Span
from edgedec.pictures import Block
from edgedec.progress import CancelToken, Progress
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

FLOAT_KV = LoadOptions(n_ctx=128, kv_type="f32")
ORACLE = LoadOptions(n_ctx=128, kv_type="f32", max_rows=64, runtime_options={"flash_attention": False})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama model of three layers."""
    return tiny_llama(tmp_path_factory.mktemp("reference") / "tiny.gguf", n_layer=3, n_embd=32, n_ff=48)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    """It, loaded."""
    with Reference().load(path, FLOAT_KV) as loaded:
        yield loaded


def tokens(n: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, N_VOCAB, n).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"architecture": "qwen2"},
        {"n_head_kv": 4},
        {"n_head_kv": 1, "tied": True},
        {"architecture": "qwen2", "n_head_kv": 1, "tied": True},
        {"n_layer": 5, "n_embd": 96, "n_head": 6, "n_head_kv": 3, "n_ff": 80},
    ],
    ids=str,
)
def test_logits_are_llama_cpps(tmp_path: Path, options: dict[str, Any]) -> None:
    """60 rows of a float32 model agree to 1e-4 of their spread, and in every argmax."""
    file = tiny_llama(tmp_path / "m.gguf", **options)
    with Reference().load(file, FLOAT_KV) as ours, LlamaCpp().load(file, ORACLE) as theirs:
        found = ours.session(128).forward(tokens(60), n_past=0, rows="all").logits
        expected = theirs.session(128).forward(tokens(60), n_past=0, rows="all").logits
        assert np.abs(found - expected).max() < 1e-4 * expected.std()
        assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))


def rewritten(file: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write a changed copy of a model, without its vocabulary; a tensor given as None is left out."""
    gguf = read_gguf(file)
    plain = {key: value for key, value in gguf.metadata.items() if isinstance(value, (int, float, str))}
    raw = {name: RawTensor(t.type, t.shape, gguf.read_tensor_bytes(name)) for name, t in gguf.tensors.items()}
    kept = {name: tensor for name, tensor in (raw | tensors).items() if tensor is not None}
    return write_gguf(file.with_name("rewritten.gguf"), plain | metadata, kept)


def test_llama_and_qwen2_rotate_differently(tmp_path: Path) -> None:
    """The same weights under the other architecture's rotation give other logits, but for the first position."""
    llama = tiny_llama(tmp_path / "llama.gguf")
    keys = {key: value for key, value in read_gguf(llama).metadata.items() if key.startswith("llama.")}
    renamed = {key.replace("llama", "qwen2"): value for key, value in keys.items()}
    qwen2 = rewritten(llama, {"general.architecture": "qwen2"} | renamed, {})
    results = []
    for file in (llama, qwen2):
        with Reference().load(file, FLOAT_KV) as model:
            results.append(model.session(8).forward(tokens(2), n_past=0, rows="all").logits)
    assert np.array_equal(results[0][0], results[1][0])
    assert np.abs(results[0][1] - results[1][1]).max() > 0.01


def test_f16_weights_are_read_as_what_they_hold(tmp_path: Path) -> None:
    """A model with F16 tensors has the bits of an F32 model with the same rounded weights."""
    half = tiny_llama(tmp_path / "half.gguf", dtype="f16", n_layer=1, n_embd=32)
    gguf = read_gguf(half)
    halves = {name: t for name, t in gguf.tensors.items() if t.type is GGMLType.F16}
    assert "blk.0.ffn_down.weight" in halves
    widened = {name: np.frombuffer(gguf.read_tensor_bytes(name), "<f2").astype("<f4") for name in halves}
    tensors = {name: RawTensor(GGMLType.F32, t.shape, widened[name].tobytes()) for name, t in halves.items()}
    full = rewritten(half, {}, tensors)
    with Reference().load(half, FLOAT_KV) as a, Reference().load(full, FLOAT_KV) as b:
        left, right = (m.session(16).forward(tokens(9), n_past=0).logits for m in (a, b))
        assert np.array_equal(left, right)


def test_an_f16_cache_rounds_keys_and_values(path: Path, model: Model) -> None:
    """kv_type f16 halves the cache and changes the logits by its rounding only."""
    with Reference().load(path, LoadOptions(kv_type="f16")) as rounded:
        expected = model.session(64).forward(tokens(40), n_past=0).logits
        found = rounded.session(64).forward(tokens(40), n_past=0).logits
        assert 0 < np.abs(found - expected).max() < 0.02
        assert rounded.card.fingerprint != model.card.fingerprint
        kv = [{term.name: term.n_bytes for term in m.memory(64, 1)}["KV cache"] for m in (rounded, model)]
        assert kv[0] < 0.51 * kv[1]


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Draw the parents of a tree of up to 10 rows."""
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, 10)))]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), trees(), st.integers(0, 9))
def test_bits_do_not_depend_on_how_a_forward_is_put_together(
    model: Model, pieces: list[int], parents: list[int], end: int
) -> None:
    """A prefill in any pieces, then any tree, then a kept path: all rows equal single steps, bit for bit."""
    n, text = sum(pieces), tokens(sum(pieces), seed=1)
    split, single = model.session(64), model.session(64)
    for piece in np.split(text, np.cumsum(pieces)[:-1]):
        split.forward(piece, n_past=split.n_cached)
    branch = tokens(len(parents), seed=2)
    grown = split.forward(branch, n_past=n, parents=np.array(parents, np.int32), rows="all").logits
    path = [end % len(parents)]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    split.keep(np.array(path, np.int32))
    for token in text:
        single.forward(np.array([token]), n_past=single.n_cached)
    for row in path:
        step = single.forward(branch[row : row + 1], n_past=single.n_cached).logits
        assert np.array_equal(step[0], grown[row])
    left, right = (session.forward(tokens(1), n_past=session.n_cached).logits for session in (split, single))
    assert np.array_equal(left, right)


def test_what_is_beyond_n_past_has_no_influence(model: Model) -> None:
    """A session that has seen other text, other layers and a tree gives a fresh one's bits after going back."""
    session = model.session(64)
    session.forward(tokens(10), n_past=0)
    session.forward(tokens(20, seed=1), n_past=10)
    session.forward(tokens(6, seed=2), n_past=12, layers=LayerSet.of(3, [0, 2]))
    session.forward(tokens(3, seed=3), n_past=11, parents=np.array([-1, 0, 0], np.int32))
    found = session.forward(tokens(5, seed=4), n_past=10, rows="all").logits
    fresh = model.session(64)
    fresh.forward(tokens(10), n_past=0)
    assert np.array_equal(found, fresh.forward(tokens(5, seed=4), n_past=10, rows="all").logits)


def test_a_skipped_layer_passes_its_input_on(model: Model) -> None:
    """The tap after a layer that is left out is the tap before it; leaving all out leaves the embedding's logits."""
    forward = model.session(16).forward(tokens(4), n_past=0, layers=LayerSet.of(3, [0, 2]), taps=(0, 1, 2))
    assert np.array_equal(forward.hidden[0], forward.hidden[1])
    assert not np.array_equal(forward.hidden[1], forward.hidden[2])
    nothing = LayerSet.of(3, [])
    alone = model.session(16).forward(tokens(1), n_past=0, layers=nothing).logits
    later = model.session(16).forward(np.append(tokens(3, seed=5), tokens(1)), n_past=0, layers=nothing).logits
    assert np.array_equal(alone, later)


def test_keys_and_values_that_were_never_written_are_not_read(model: Model) -> None:
    """Each (layer, position) knows whether it was written, through keep, fork and save."""
    without = LayerSet(attn=np.array([True, False, True]), mlp=np.ones(3, np.bool_))
    session = model.session(32)
    session.forward(tokens(9), n_past=0)  # of which positions 5 to 8 are dropped, in every layer
    session.forward(tokens(3), n_past=5, parents=np.array([-1, 0, 0], np.int32), layers=without)
    session.keep(np.array([0, 2], np.int32))
    twin = session.fork()
    restored = model.session(32)
    restored.load(session.save(), 7)
    for holder in (session, twin, restored):
        with pytest.raises(SessionError, match="layer 1 has no keys and values at position 5"):
            holder.forward(tokens(1), n_past=7)
        assert holder.n_cached == 7
        holder.forward(tokens(1), n_past=7, layers=without)
        holder.forward(tokens(1), n_past=5)


def test_a_forward_resumed_from_hidden_states_completes_its_rows(model: Model) -> None:
    """Rows begun in the lower layers and resumed in the upper ones leave the KV of whole rows behind."""
    whole, halves = model.session(32), model.session(32)
    for session in (whole, halves):
        session.forward(tokens(5), n_past=0)
    expected = whole.forward(tokens(3, seed=1), n_past=5, rows="all").logits
    begun = halves.forward(tokens(3, seed=1), n_past=5, layers=LayerSet.of(3, [0]), taps=(0,))
    found = evaluated(halves, 5, RowGroup(vectors=begun.hidden[0], span=Span(enter=1)), rows="all").logits
    assert np.array_equal(found, expected)
    left, right = (session.forward(tokens(1), n_past=8).logits for session in (halves, whole))
    assert np.array_equal(left, right)


def test_a_forward_resumed_elsewhere_leaves_holes_in_the_lower_layers(model: Model) -> None:
    """Without the lower layers' part in this session the rows can't be built on."""
    other = model.session(32).forward(tokens(3), n_past=0, taps=(1,))
    session = model.session(32)
    evaluated(session, 0, RowGroup(vectors=other.hidden[1], span=Span(enter=2)))
    with pytest.raises(SessionError, match="layer 0 has no keys and values at position 0"):
        session.forward(tokens(1), n_past=3)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"tokens": np.zeros(2, np.float32)}, RequestError),
        ({"tokens": tokens(2), "taps": (3,)}, RequestError),
        ({"tokens": tokens(2), "rows": "first"}, RequestError),
        ({"tokens": tokens(2), "rows": np.array([1, 0], np.int32)}, RequestError),
        ({"tokens": tokens(2), "layers": LayerSet.of(2, [0])}, RequestError),
        ({"tokens": tokens(257), "rows": "all"}, CapabilityError),
    ],
)
def test_what_a_forward_cannot_be_asked_for(model: Model, arguments: dict[str, Any], error: type[Exception]) -> None:
    """Contradictions are refused by name, and nothing is evaluated."""
    session = model.session(300)
    with pytest.raises(error):
        session.forward(n_past=0, **arguments)
    assert session.n_cached == 0


VECTORS = np.zeros((2, 32), np.float32)


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ([], {}),
        ([RowGroup()], {}),
        ([RowGroup(tokens(2), VECTORS)], {}),
        ([RowGroup(tokens(2), span=Span(enter=1))], {}),
        ([RowGroup(vectors=np.zeros((2, 31), np.float32), span=Span(enter=1))], {}),
        ([RowGroup(vectors=VECTORS, span=Span(enter=4))], {}),
        ([RowGroup(vectors=VECTORS, span=Span(enter=2))], {"taps": (1,)}),
        ([RowGroup(tokens(2), span=Span(leave=4))], {}),
        ([RowGroup(vectors=VECTORS, span=Span(enter=2, leave=1))], {}),
        ([RowGroup(tokens(2)), RowGroup(tokens(1), sees=np.array([2], np.int32))], {}),
        ([RowGroup(tokens(2)), RowGroup(tokens(2), positions=np.arange(2, dtype=np.int32))], {}),
        ([RowGroup(tokens(2)), RowGroup(vectors=VECTORS, sees=Block(2, 2, 1))], {}),
        ([RowGroup(tokens(2)), RowGroup(tokens(1))], {"rows": np.array([3], np.int32)}),
    ],
)
def test_groups_that_a_forward_cannot_have(model: Model, groups: list[RowGroup], wanted: dict[str, Any]) -> None:
    """Rows that are neither tokens nor vectors, or both, layers that are not there, and rows that are not there."""
    session = model.session(300)
    with pytest.raises(RequestError):
        evaluated(session, 0, *groups, **wanted)
    assert session.n_cached == 0


def test_rows_of_all_items_together_are_bounded(model: Model) -> None:
    """max_rows counts the rows of a forward, not of an item."""
    items = [ForwardItem(model.session(200), 0, (RowGroup(tokens(200)),), rows="all") for _ in range(2)]
    with pytest.raises(CapabilityError, match="256"):
        model.forward(items)


def test_cancel_stops_between_two_rows(model: Model) -> None:
    """A forward cancelled during its third row ends with three rows cached, a tree with none."""
    session = model.session(32)

    def cancel_at_3(progress: Progress) -> None:
        if progress.done == 3:
            session.cancel()

    with pytest.raises(CancelledError, match="3 tokens"):
        session.forward(tokens(9), n_past=0, on_progress=cancel_at_3)
    assert session.n_cached == 3
    with pytest.raises(CancelledError):
        session.forward(tokens(5), n_past=3, parents=np.full(5, -1, np.int32), on_progress=cancel_at_3)
    found = session.forward(tokens(9)[3:], n_past=3).logits
    assert np.array_equal(found, model.session(32).forward(tokens(9), n_past=0).logits)


def test_cancelling_one_session_stops_the_forward_it_shares(model: Model) -> None:
    """What was evaluated stays cached; the item that was to come is as it was, whichever of the two was cancelled."""
    first, second = model.session(16), model.session(16)
    second.forward(tokens(5), n_past=0)
    items = [ForwardItem(first, 0, (RowGroup(tokens(3)),)), ForwardItem(second, 0, (RowGroup(tokens(3)),))]
    reports: list[Progress] = []

    def cancel_second(progress: Progress) -> None:
        reports.append(progress)
        second.cancel()

    with pytest.raises(CancelledError, match="1 and 5 tokens"):
        model.forward_with_progress(items, cancel_second)  # type: ignore[attr-defined] # the reference's own
    assert (first.n_cached, second.n_cached, len(reports)) == (1, 5, 1)


def test_saved_state_of_another_model_is_refused(tmp_path: Path, model: Model) -> None:
    """Models that differ by weights alone have other fingerprints, and do not load each other's state."""
    session = model.session(16)
    session.forward(tokens(4), n_past=0)
    data = session.save()
    file = tiny_llama(tmp_path / "other.gguf", seed=1, n_layer=3, n_embd=32, n_ff=48)
    with Reference().load(file, FLOAT_KV) as other:
        assert other.card.fingerprint != model.card.fingerprint
        with pytest.raises(ModelFormatError, match="not one of 4 tokens of this model"):
            other.session(16).load(data, 4)


@pytest.mark.slow
def test_the_tokenizer_is_llama_cpps(path: Path, model: Model) -> None:
    """Text becomes the same ids, and ids the same text, as in llama.cpp."""
    texts = ["Hello  world", "naïve 東京\n\t🙂", "</s> is text", "", " a"]
    with LlamaCpp().load(path, ORACLE) as theirs:
        ours, oracle = model.tokenizer, theirs.tokenizer
        for text in texts:
            for special in ({}, {"add_special": False}, {"parse_special": True}):
                assert ours.encode(text, **special) == oracle.encode(text, **special)
            assert ours.decode(ours.encode(text)) == oracle.decode(oracle.encode(text)) == text
        assert [ours.piece(i) for i in range(N_VOCAB)] == [oracle.piece(i) for i in range(N_VOCAB)]
        assert [ours.is_end(i) for i in range(N_VOCAB)] == [oracle.is_end(i) for i in range(N_VOCAB)]
        assert (ours.bos_token, ours.eos_token, ours.n_vocab) == (oracle.bos_token, oracle.eos_token, N_VOCAB)


def test_the_tokenizer_by_hand(model: Model) -> None:
    """Bytes are tokens, the space is one of its own, control tokens are read only where asked for."""
    tokenizer = model.tokenizer
    assert tokenizer.encode("A b") == [BOS, *byte_ids("A b")]
    assert byte_ids("A b")[1] == SPACE
    assert tokenizer.encode("x</s>", add_special=False, parse_special=True) == [*byte_ids("x"), EOS]
    assert tokenizer.decode([*byte_ids("é")[:1], EOS]) == "\ufffd"
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("\ud800")
    with pytest.raises(RequestError, match="outside the vocabulary"):
        tokenizer.piece(N_VOCAB)


def test_a_vocabulary_without_byte_tokens_still_gives_logits(tmp_path: Path) -> None:
    """The oracle works on ids; only encode() refuses."""
    bare = rewritten(tiny_llama(tmp_path / "m.gguf", n_layer=1), {}, {})
    with Reference().load(bare, FLOAT_KV) as model:
        model.session(4).forward(tokens(2), n_past=0)
        with pytest.raises(UnsupportedModelError, match="byte tokens"):
            model.tokenizer.encode("a")


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"general.architecture": "bloom"}, "'bloom'"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope scaling 'dynamic'"),
        ({"llama.attention.value_length": 4}, "differ in length"),
    ],
)
def test_what_could_change_a_logit_unnoticed_is_refused(tmp_path: Path, metadata: dict[str, Any], match: str) -> None:
    """Another architecture, an unknown key and unequal heads are refused from the header, each by name."""
    file = rewritten(tiny_llama(tmp_path / "m.gguf", n_layer=1, n_embd=32), metadata, {})
    with pytest.raises(UnsupportedModelError, match=match):
        Reference().load(file, FLOAT_KV)
    assert match.strip("'") in (Reference().accepts(file) or "")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"output_norm.weight": None}, ModelFormatError, "no tensor 'output_norm.weight'"),
        ({"attn_sinks.weight": np.ones(4, np.float32)}, UnsupportedModelError, "no use for tensor 'attn_sinks.weight'"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, ModelFormatError, "shape \\(3,\\), expected F32 of 4"),
        ({"rope_freqs.weight": np.zeros(4, np.float32)}, ModelFormatError, "'rope_freqs.weight' holds what is no pos"),
        ({"output_norm.weight": np.ones(31, np.float32)}, ModelFormatError, "the shape"),
        ({"output.weight": RawTensor(GGMLType.Q8_0, (32, 260), bytes(260 * 34))}, UnsupportedModelError, "is Q8_0"),
    ],
)
def test_tensors_are_all_there_and_all_used(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    """A missing, an unused, a misshapen and a quantized tensor are refused, each by name."""
    file = rewritten(tiny_llama(tmp_path / "m.gguf", n_layer=1, n_embd=32), {}, change)
    with pytest.raises(error, match=match):
        Reference().load(file, FLOAT_KV)


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions(kv_type="q8_0"),
        LoadOptions(n_gpu_layers=4),
        LoadOptions(device="Vulkan0"),
        LoadOptions(runtime_options={"flash_attention": True}),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(path: Path, options: LoadOptions) -> None:
    """For planning as for loading."""
    with pytest.raises(RequestError):
        Reference().load(path, options)
    with pytest.raises(RequestError):
        Reference().plan(path, options)


def test_loading_can_be_cancelled(path: Path) -> None:
    """A token that is set already stops it."""
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(CancelledError, match=path.name):
        Reference().load(path, LoadOptions(cancel=cancel))


def test_the_plan_is_what_the_model_says_later(path: Path, model: Model) -> None:
    """Header and weights lead to the same terms; only what the process held before may differ."""
    planned = {term.name: term for term in Reference().plan(path, LoadOptions(n_ctx=64, kv_type="f32", max_rows=8))}
    later = {term.name: term for term in model.memory(64, 8)}
    assert planned.keys() == later.keys()
    assert [term.name for term in planned.values() if term.base] == ["interpreter and libraries"]
    assert all(planned[name] == later[name] for name in planned if not planned[name].base)
    assert planned["KV cache"].n_bytes == 3 * 64 * (2 * 16 * 4 + 1)
    assert Reference().accepts(path) is None
    assert Reference().report().devices == ("CPU",)
