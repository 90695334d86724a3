"""Layers left out in every forward: the text is that of forwards by hand, and no cache serves another set of layers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forwards import evaluated
from support.models.tiny_models import BOS, byte_ids, tiny_llama
from support.processes.command_line import run_here

import edgedec
from edgedec.api.options import DraftOptions, Lossy
from edgedec.drafters.suffix.store_file import DraftStore, vocabulary_hash
from edgedec.errors import CapabilityError, ModelFormatError, RequestError, SessionError
from edgedec.gguf.layer_bytes import LayerBytes, layer_bytes
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, LayerSet, Model, RowGroup, Span
from edgedec.sampling import Noise, SamplingParams, draw
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.layer_skip.choose import (
    MEASURED,
    LossyModel,
    Measured,
    choose_layers,
    lossy_note,
    require_layer_skip,
    require_measured,
    variant,
)
from edgedec_runtimes.layer_skip.layer_sets import TunedSet, evenly_spaced, keep_tuned_set, left_out, without

TEXT = "the cat sat on the mat, the dog sat on the log, the cat sat on the "
PROMPT = [BOS, *byte_ids(TEXT)]
N_LAYER, N_CTX, N_TOKENS, SEED = 6, 256, 40, 5
SKIP = 1.4  # two layers of six
OUT = ((2, 0), (2, 1), (3, 0), (3, 1))
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "penalized": {"temperature": 0.8, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("lossy") / "tiny.gguf", seed=1, n_layer=N_LAYER, n_ctx_train=1024)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    """It, whole, on the cpu runtime."""
    with Cpu().load(path, LoadOptions(n_ctx=N_CTX, n_threads=1)) as loaded:
        yield loaded


def opened(
    path: Path, cache: Path, layer_skip: float | None = SKIP, *, slide: bool = False, **options: Any
) -> edgedec.Engine:
    """Load it with layers left out, whatever that costs."""
    chosen: dict[str, Any] = {"runtime": "cpu", "n_ctx": N_CTX, "n_threads": 1, "draft": None, "cache_dir": cache}
    lossy = Lossy(layer_skip=layer_skip, layer_skip_force=True, slide=slide)
    return edgedec.load(path, lossy=lossy, **chosen | options)


def by_hand(model: Model, layers: LayerSet | None, way: dict[str, Any], prompt: list[int] = PROMPT) -> tuple[int, ...]:
    """Return the tokens that forwards with this set give, one at a time."""
    session, text, params = model.session(N_CTX), list(prompt), SamplingParams(**way)
    forward = session.forward(np.array(text, np.int32), n_past=0, layers=layers)
    while True:
        text.append(draw(forward.logits[0], params, text, Noise(SEED), len(text), forward.ops))
        if len(text) == len(prompt) + N_TOKENS:
            session.close()
            return tuple(text[len(prompt) :])
        forward = session.forward(np.array(text[-1:], np.int32), n_past=len(text) - 1, layers=layers)


def texts(engine: edgedec.Engine) -> dict[str, tuple[int, ...]]:
    """Return what an engine generates in every way to draw tokens."""
    options: dict[str, Any] = {"max_tokens": N_TOKENS, "seed": SEED, "ignore_end": True}
    return {name: engine.generate(PROMPT, **options, **way).token_ids for name, way in WAYS.items()}


# The text


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "suffix+recycling", "auto"])
def test_the_text_is_that_of_forwards_by_hand(path: Path, model: Model, tmp_path: Path, draft: str | None) -> None:
    """Greedy and with a seed, with drafts and without; it is not the whole model's."""
    expected = {name: by_hand(model, without(N_LAYER, OUT), way) for name, way in WAYS.items()}
    with opened(path, tmp_path, draft=draft) as engine:
        assert engine.card.left_out == OUT
        assert texts(engine) == expected
        assert texts(engine) == expected  # with the KV cache and the stores as the first round left them
        stats = engine.generate(PROMPT, max_tokens=N_TOKENS, temperature=0.0, ignore_end=True).stats
    assert (stats.n_drafts > 0) == (draft == "suffix+recycling") or draft == "auto"
    assert all(by_hand(model, None, way) != expected[name] for name, way in WAYS.items())


def test_parallel_requests_get_the_same_text(path: Path, model: Model, tmp_path: Path) -> None:
    """Joined forwards leave out the same layers."""
    expected = by_hand(model, without(N_LAYER, OUT), WAYS["greedy"])
    with opened(path, tmp_path, n_parallel=2, draft="suffix") as engine, ThreadPoolExecutor(2) as pool:
        options: dict[str, Any] = {"max_tokens": N_TOKENS, "temperature": 0.0, "ignore_end": True}
        jobs = [pool.submit(engine.generate, PROMPT, **options) for _ in range(4)]
        assert {job.result(60).token_ids for job in jobs} == {expected}


@pytest.mark.slow
def test_a_context_that_slides(path: Path, model: Model, tmp_path: Path) -> None:
    """Before the window moves the text is that of forwards by hand; it goes on behind that."""
    expected = by_hand(model, without(N_LAYER, OUT), WAYS["greedy"])
    with opened(path, tmp_path, slide=True) as engine:
        found = engine.generate(PROMPT, max_tokens=N_CTX, temperature=0.0, ignore_end=True)
    assert found.token_ids[:N_TOKENS] == expected
    assert len(found.token_ids) == N_CTX


def test_nothing_is_left_out_at_one(path: Path, model: Model, tmp_path: Path) -> None:
    """The whole model's text, by the whole model's fingerprint, and nothing lossy is told."""
    with opened(path, tmp_path, 1.0) as engine:
        assert engine.generate(PROMPT, max_tokens=N_TOKENS, temperature=0.0, ignore_end=True).token_ids == by_hand(
            model, None, WAYS["greedy"]
        )
        assert (engine.card.left_out, engine.card.share, lossy_note(engine.card)) == ((), 1.0, "")


def test_it_says_that_it_is_lossy(path: Path, tmp_path: Path) -> None:
    """In the statistics, with the layers and the share of the bytes; in a summary and under --explain --verbose."""
    share = layer_bytes(path).share(without(N_LAYER, OUT))
    with opened(path, tmp_path) as engine:
        stats = engine.generate(PROMPT, max_tokens=2).stats
        assert engine.card.share == share
    read = f"a token reads {100 * share:.0f} % of the bytes"
    note = f"LOSSY: layers 2 3 left out, {read}; the text is not the whole model's"
    assert stats.lossy == note
    assert stats.notes == [note]
    assert stats.as_dict()["lossy"] == note
    result = run_here(
        *("run", path, TEXT, "--raw", "--runtime", "cpu", "-n", "3", "--explain", "-v", "--draft", "off"),
        *("--method", f"layer-skip:speedup={SKIP}", "--method", "layer-skip:force=yes"),
    )
    assert result.code == 0, result.err
    (summary,) = (line for line in result.err.splitlines() if note in line)
    assert summary.endswith(f"3 tokens (length) · {note}")


@pytest.mark.slow
def test_a_benchmark_says_so(path: Path, tmp_path: Path) -> None:
    """Drafts are compared with plain decoding of the same layers, and the report names them."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "one", "task": "any", "turns": ["the cat sat on the mat"]}\n', encoding="utf-8")
    skip = ("--method", f"layer-skip:speedup={SKIP}", "--method", "layer-skip:force=yes")
    result = run_here("bench", path, "--runtime", "cpu", *skip, "--prompts", prompts, "-n", "8", "-q")
    assert result.code == 0, result.err
    assert "LOSSY: layers 2 3 left out" in result.text


def test_names_of_what_is_left_out() -> None:
    """Whole layers together, halves apart; sets are told apart by every half."""
    card: Any = type("Card", (), {"left_out": ((1, 0), (1, 1), (3, 1), (4, 0)), "share": 0.75})
    expected = "LOSSY: layers 1, attention of 4, feed-forward of 3 left out, a token reads 75 % of the bytes; "
    assert lossy_note(card) == expected + "the text is not the whole model's"
    assert (variant(()), variant([(1, 0), (3, 1)])) == ("", "without 1.0 3.1")


# Which layers


def test_as_few_layers_as_the_wish_allows() -> None:
    """The evenly spaced set of most layers with 1 / R of the bytes or less; the head counts."""
    sizes = LayerBytes(np.full((10, 2), 8), 40)  # a layer is 0.08
    for speedup, n_out in ((1.0, 0), (1.001, 1), (1 / 0.92, 1), (1.1, 2), (1.25, 3), (1 / 0.36, 8)):
        found = choose_layers(sizes, speedup)
        assert left_out(found.layers) == left_out(evenly_spaced(10, n_out)), speedup
        assert found.share == pytest.approx(1 - 0.08 * n_out)
    with pytest.raises(RequestError, match=r"3 is out of reach: .* reads 36 % of the bytes, a speed-up of 2.78"):
        choose_layers(sizes, 3)


@pytest.mark.parametrize(("share", "taken"), [(0.81, False), (0.8, True), (0.73, True), (0.71, False)])
def test_a_tuned_set_is_taken_where_it_reads_as_few_bytes(share: float, taken: bool) -> None:
    """No more than were wished for, and no more than a layer fewer."""
    sizes, layers = LayerBytes(np.full((10, 2), 8), 40), without(10, [(1, 1), (4, 0)])
    found = choose_layers(sizes, 1.25, TunedSet(layers, share, 0.8, 0.7, 100))
    assert (found.layers is layers) == taken
    assert found.share == (share if taken else 0.76)


@pytest.mark.slow
def test_the_set_that_was_tuned_is_found(path: Path, model: Model, tmp_path: Path) -> None:
    """By the whole model's fingerprint, below the cache folder."""
    layers = without(N_LAYER, [(1, 1), (4, 1), (3, 0)])
    share = layer_bytes(path).share(layers)
    with opened(path, tmp_path, None) as engine:
        keep_tuned_set(tmp_path, engine.card, TunedSet(layers, share, 0.8, 0.7, 100), lossy=True)
    with opened(path, tmp_path, 1 / share - 0.01) as engine:
        assert engine.card.left_out == tuple(left_out(layers))
        assert texts(engine)["greedy"] == by_hand(model, layers, WAYS["greedy"])


# What is refused


@pytest.mark.slow
def test_wishes_that_are_refused(path: Path, tmp_path: Path) -> None:
    """Below 1 and out of reach always; what was not measured, and drafters of single layers, with what to do."""
    for speedup in (0.9, 0.0, -1.0, float("nan"), float("inf")):
        is_number = speedup == speedup
        says = "is no speed-up; give a number" if is_number else "layer_skip is nan; it must be a number or None"
        with pytest.raises(RequestError, match=says):
            opened(path, tmp_path, speedup)
    with pytest.raises(RequestError, match="out of reach"):
        opened(path, tmp_path, 9.0)
    says = r"never measured for a llama of 6 layers and 64 values .*; measure it .*force"
    with pytest.raises(RequestError, match=says):
        edgedec.load(path, runtime="cpu", lossy=Lossy(layer_skip=SKIP), cache_dir=tmp_path)
    for draft in ("skip", "suffix+exit"):
        with pytest.raises(RequestError, match="runs a part of the layers"):
            opened(path, tmp_path, draft=draft)
    run_here("run", path, "x", "--runtime", "cpu", "--method", "layer-skip:speedup=1.4").failed(40, "never measured")


def test_beyond_what_was_measured() -> None:
    """The edge is taken; beyond it the refusal says what was found there."""
    table = {("llama", 6, 64): (Measured(1.1, 0.1, 0.8), Measured(1.3, 0.456, 0.517))}
    require_measured(("llama", 6, 64), 1.3, table)
    with pytest.raises(RequestError, match=r"1.31 is beyond 1.3, .* at 1.3, 52 % of the tokens .* of 0.46.* force it"):
        require_measured(("llama", 6, 64), 1.31, table)


def test_the_table_is_in_order() -> None:
    """Speed-ups rise from above 1, and each costs more than the one before; at the edge most tokens are the same."""
    assert MEASURED
    for rows in MEASURED.values():
        assert [row.speedup for row in rows] == sorted({row.speedup for row in rows})
        assert [row.kl_mean for row in rows] == sorted(row.kl_mean for row in rows)
        assert rows[0].speedup > 1
        assert rows[-1].top1 > 0.5


@pytest.mark.slow
def test_a_runtime_without_the_capability_is_refused(path: Path, tmp_path: Path) -> None:
    """llama.cpp runs all layers of a model."""
    pytest.importorskip("llama_cpp")
    with pytest.raises(CapabilityError, match="llamacpp runtime cannot do 'layers'"):
        opened(path, tmp_path, runtime="llamacpp")


def test_auto_takes_a_runtime_that_leaves_out_layers(path: Path, tmp_path: Path) -> None:
    """Whatever a measurement would say."""
    with opened(path, tmp_path, runtime="auto") as engine:
        assert engine.card.runtime == "cpu"


def test_no_other_set_can_be_asked_for(path: Path, model: Model, tmp_path: Path) -> None:
    """A forward with layers of its own, or from hidden states, and one with a session of the whole model."""
    row = np.array([5], np.int32)
    with opened(path, tmp_path) as engine:
        session = engine.session()
        assert not engine.model.capabilities.layers
        with pytest.raises(CapabilityError, match="leaves out the same layers"):
            session.forward(row, n_past=0, layers=without(N_LAYER, []))
        with pytest.raises(CapabilityError, match="leaves out the same layers"):
            evaluated(session, 0, RowGroup(vectors=np.zeros((1, 64), np.float32), span=Span(enter=1)))
        with pytest.raises(RequestError, match="rows are either tokens"):
            evaluated(session, 0)
        with pytest.raises(SessionError, match="another model"):
            engine.model.forward([ForwardItem(model.session(8), 0, (RowGroup(row),))])
        assert session.n_cached == 0


# Caches


def fingerprints(path: Path, cache: Path) -> list[str]:
    """Return those of the whole model and of two sets of layers."""
    found = []
    for skip in (None, 1.1, SKIP):
        with opened(path, cache, skip) as engine:
            found.append(engine.card.fingerprint)
    return found


@pytest.mark.slow
def test_every_set_has_a_fingerprint_of_its_own(path: Path, tmp_path: Path) -> None:
    """The same one again for the same set."""
    first = fingerprints(path, tmp_path)
    assert len(set(first)) == 3
    assert fingerprints(path, tmp_path) == first


@pytest.mark.slow
def test_a_prompt_cache_serves_its_own_layers_only(path: Path, tmp_path: Path) -> None:
    """It is restored with the same set, with the same text, and refused with another and without one."""
    file = tmp_path / "prompt"
    with opened(path, tmp_path) as engine:
        expected = texts(engine)["greedy"]
        save_prompt_cache(engine, file)
    with opened(path, tmp_path) as engine:
        assert load_prompt_cache(engine, file) > len(PROMPT)
        found = engine.generate(PROMPT, max_tokens=N_TOKENS, temperature=0.0, ignore_end=True)
        assert (found.token_ids, found.stats.n_reused_tokens) == (expected, len(PROMPT) - 1)
    for skip in (1.1, None):
        with opened(path, tmp_path, skip) as engine, pytest.raises(ModelFormatError, match="another model"):
            load_prompt_cache(engine, file)


def test_a_saved_session_serves_its_own_layers_only(model: Model) -> None:
    """Of sessions too what one set saved is refused by another, and by the whole model."""
    tokens = np.array(PROMPT, np.int32)
    ours, others = (LossyModel(model, without(N_LAYER, out), 0.8) for out in (OUT, OUT[:2]))
    session = ours.session(N_CTX)
    expected = session.forward(tokens, n_past=0).logits.copy()
    data = session.save()
    again = ours.session(N_CTX)
    again.load(data, len(tokens))
    np.testing.assert_array_equal(again.forward(tokens[-1:], n_past=len(tokens) - 1).logits, expected)
    for other in (others.session(N_CTX), model.session(N_CTX)):
        with pytest.raises(ModelFormatError, match="saved state"):
            other.load(data, len(tokens))
    with pytest.raises(ModelFormatError, match="other layers"):
        ours.session(N_CTX).load(model.session(N_CTX).save(), 0)


@pytest.mark.slow
def test_the_cost_curve_is_kept_for_its_own_layers(path: Path, tmp_path: Path) -> None:
    """Each set measures its own, and finds it again."""
    for n_curves, skip in ((1, None), (2, SKIP), (2, SKIP), (3, 1.1), (3, None)):
        with opened(path, tmp_path, skip, draft="auto"):
            assert len(list((tmp_path / "probes").glob("curve-*.json"))) == n_curves


@pytest.mark.slow
def test_a_draft_store_serves_its_own_layers_only(path: Path, tmp_path: Path) -> None:
    """The whole model refuses the texts of a part of it, and the other way round."""
    file = tmp_path / "store"
    with opened(path, tmp_path, draft="suffix", drafting=DraftOptions(store=file)) as engine:
        texts(engine)
    opened(path, tmp_path, draft="suffix", drafting=DraftOptions(store=file)).close()
    for skip in (None, 1.1):
        with pytest.raises(ModelFormatError, match="holds texts of other layers"):
            opened(path, tmp_path, skip, draft="suffix", drafting=DraftOptions(store=file))


def test_a_store_without_layers_left_out_is_as_before(model: Model, tmp_path: Path) -> None:
    """An empty variant names the vocabulary alone, so files of earlier releases stay good."""
    assert vocabulary_hash(model.tokenizer, variant(())) == vocabulary_hash(model.tokenizer)
    assert DraftStore(tmp_path / "a", model).path == tmp_path / "a"


# Other runtimes


@pytest.mark.slow
def test_an_export_leaves_out_layers_too(tmp_path: Path) -> None:
    """Its header has no tensors: shares are counted in weights, and forwards by hand give the same text."""
    pytest.importorskip("onnx")
    from support.models.onnx_exports import export_tiny, load

    exported = export_tiny(tmp_path, "llama", ("F32",), "f32", {"n_layer": 5})
    theirs, ours = layer_bytes(exported.gguf), layer_bytes(exported.folder)
    for n_out in range(4):
        layers = evenly_spaced(5, n_out)
        assert ours.share(layers) == pytest.approx(theirs.share(layers), abs=0.002)  # norms apart
    sizes = require_layer_skip(exported.folder, 1.3, force=True)
    layers = choose_layers(sizes, 1.3).layers
    with load(exported.folder) as model:
        session, text, greedy = model.session(128), list(PROMPT[:20]), SamplingParams(temperature=0.0)
        for _ in range(12):
            forward = session.forward(np.array(text, np.int32), n_past=0, layers=layers)
            text.append(draw(forward.logits[0], greedy, text, Noise(0), len(text), forward.ops))
    with opened(exported.folder, tmp_path, 1.3, runtime="onnx", n_ctx=128) as engine:
        assert engine.card.left_out == tuple(left_out(layers))
        found = engine.generate(PROMPT[:20], max_tokens=12, temperature=0.0, ignore_end=True)
    assert found.token_ids == tuple(text[20:])
