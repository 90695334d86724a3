"""The onnx runtime keeps the contract of edgedec.model, and its numbers are those of the other runtimes."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance.memory_reading import probe_of
from support.conformance.runtime import check_runtime
from support.models.onnx_exports import Exporter, copied, load, rewritten
from support.models.tiny_quantized import EXPORTED
from support.models.tiny_runs import bits, one_by_one
from support.processes.forked import in_a_forked_child

import edgedec
from edgedec.api.options import DraftOptions, Numerics
from edgedec.errors import CancelledError, RequestError, RuntimeUnavailableError, SessionError, UnsupportedModelError
from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem, LayerSet, Model
from edgedec.progress import OnProgress
from edgedec.runtime import Runtime
from edgedec.testing import raise_failures
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.onnx.feeds import CHUNK, Padding
from edgedec_runtimes.onnx.graph_model import Opened
from edgedec_runtimes.onnx.library import load_library
from edgedec_runtimes.onnx.model import OnnxModel, OnnxSession
from edgedec_runtimes.onnx.runtime import Onnx
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.shared.pages import give_back

TOKENS = np.random.default_rng(0).integers(0, 260, 700).astype(np.int32)
PARENTS = np.array([-1, 0, 0, 1, 2, 2, 5, -1], np.int32)


@pytest.mark.slow
def test_it_conforms(exported: Exporter) -> None:
    """Every check passes, memory as counted in another process among them."""
    folder = exported(types=("Q4_K", "Q6_K"), n_ctx_train=4096).folder
    probe = probe_of("onnx", folder)
    results = check_runtime(lambda: load(folder), memory_probe=probe)
    raise_failures(results)
    skipped = {result.name for result in results if result.status == "skipped"}
    assert skipped <= {"cancel_stops_a_forward"}  # where forwards end too soon to be cancelled


@pytest.mark.slow
def test_int8_keys_and_values_conform(exported: Exporter) -> None:
    """The same with keys and values as int8, and a sliding window."""
    raise_failures(check_runtime(lambda: load(exported("gemma3", ("Q8_0",), kv="int8").folder)))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_every_architecture_has_the_numbers_of_another_runtime(exported: Exporter, name: str) -> None:
    """Chain, tree, kept path, half of the layers and taps: float weights in both, so that only rounding differs."""
    model = exported(name)
    other: Runtime = Reference() if name in ("llama", "qwen2") else Cpu()
    options = LoadOptions(n_ctx=128, n_threads=1, kv_type="f32" if other.name == "reference" else "f16")
    with load(model.folder) as ours, other.load(model.gguf, options) as theirs:
        tolerance = 1e-5 if other.name == "reference" else 1e-3  # the cpu runtime keeps keys and values as f16
        found, expected = results(ours), results(theirs)
        for i, (mine, its) in enumerate(zip(found, expected, strict=True)):
            assert np.abs(mine - its).max() <= tolerance * np.ptp(its), i


def results(model: Model) -> list[Any]:
    """Return what a model computes in several ways."""
    session, n = model.session(128), model.card.n_layer
    found = [session.forward(TOKENS[:40], n_past=0, rows="all").logits.copy()]
    forward = session.forward(TOKENS[40:43], n_past=40, taps=(0, n - 1))
    found += [forward.logits.copy(), *forward.hidden.values()]
    tree = session.forward(TOKENS[43:51], n_past=43, parents=PARENTS, rows=np.array([0, 3, 6, 7], np.int32))
    found.append(tree.logits.copy())
    session.keep(np.array([0, 2, 5], np.int32))
    found.append(session.forward(TOKENS[51:53], n_past=46).logits.copy())
    half = LayerSet(np.arange(n) % 2 == 0, np.arange(n) % 3 != 1)
    found.append(session.forward(TOKENS[53:56], n_past=48, layers=half, rows="all").logits.copy())
    found.append(session.forward(TOKENS[53:56], n_past=48, rows="all").logits.copy())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("types", [("F32",), ("Q4_0", "Q8_0"), ("Q4_K", "Q5_K", "Q6_K"), ("Q5_1", "F16")])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_rows_of_any_number_have_the_bits_of_single_steps(
    exported: Exporter, types: tuple[str, ...], n_threads: int
) -> None:
    """Chains of every length to 16 equal single steps, after a short and a long prefix, up to the last slot."""
    with load(exported(types=types).folder, n_threads=n_threads) as model:
        assert model.batch_invariant == 16
        for n_past in (3, 200):
            session = model.session(n_past + 17)
            session.forward(TOKENS[:n_past], n_past=0)
            steps = one_by_one(session, TOKENS[n_past : n_past + 17])
            for n in (2, 3, 8, 15, 16):
                chain = session.forward(TOKENS[n_past : n_past + n], n_past=n_past, rows="all").logits
                assert np.array_equal(bits(chain), steps[:n])
            after = session.forward(TOKENS[n_past + 16 : n_past + 17], n_past=n_past + 16)
            assert np.array_equal(bits(after.logits), steps[16:])
            assert session.n_cached == session.n_ctx


@pytest.mark.slow
def test_single_steps_are_compared_through_three_layers(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer and two in the middle run, which costs a large model a few steps at its first load."""
    seen: list[list[int]] = []
    evaluate = OnnxSession.evaluate

    def noted(session: OnnxSession, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        layers = item.groups[0].span.layers
        assert layers is not None
        seen.append(np.flatnonzero(layers.mask.all(1)).tolist())
        return evaluate(session, item, on_progress)

    folder = exported(types=("Q4_K", "Q6_K"), n_layer=5).folder
    monkeypatch.setattr(OnnxSession, "evaluate", noted)
    with load(folder):
        assert seen == [[0, 2, 3]] * 4


def test_attention_alone_gets_the_second_row(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows repeated for attention give the bits of rows that all of the graph gets, as it does where others differ."""
    folder = exported(types=("Q4_K", "Q6_K")).folder
    found = []
    for exact, padding in ((True, Padding.ATTENTION), (False, Padding.ALL)):
        if not exact:
            monkeypatch.setattr("edgedec_runtimes.onnx.model.one_row_is_exact", lambda *_: False)
        with load(folder) as model:
            assert isinstance(model, OnnxModel)
            if exact and model.padding is Padding.ALL:
                pytest.skip("the kernels of this processor compute one row otherwise than several")
            assert (model.padding, model.batch_invariant) == (padding, 16)
            session = model.session(64)
            found.append([bits(session.forward(TOKENS[: 2 * n + 1], n_past=0).logits) for n in range(3)])
            found[-1] += [one_by_one(session, TOKENS[:4])]
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.slow
def test_a_row_does_not_depend_on_which_rows_are_asked_for(exported: Exporter) -> None:
    """One row of logits goes through the head as two, none at all costs nothing and fails nothing."""
    with load(exported(types=("Q4_K",)).folder) as model:
        session = model.session(64)
        session.forward(TOKENS[:20], n_past=0, rows=np.empty(0, np.int32))
        everything = bits(session.forward(TOKENS[20:25], n_past=20, rows="all").logits)
        for rows in ([4], [0, 3], [1, 2, 4]):
            some = session.forward(TOKENS[20:25], n_past=20, rows=np.array(rows, np.int32))
            assert np.array_equal(bits(some.logits), everything[rows])


@pytest.mark.slow
def test_a_long_prefill_is_cut_where_a_cold_start_is(exported: Exporter) -> None:
    """Going on from a border of a chunk gives the bits of one forward over everything, in all rows and taps."""
    with load(exported(n_ctx_train=1024).folder) as model:
        session, n = model.session(700), 2 * CHUNK + 33
        seen: list[int] = []
        whole = session.forward(TOKENS[:n], n_past=0, taps=(1,), on_progress=lambda p: seen.append(p.done))
        expected, states = bits(whole.logits), whole.hidden[1].copy()
        assert seen == [CHUNK, 2 * CHUNK, n]
        rest = session.forward(TOKENS[CHUNK:n], n_past=CHUNK, taps=(1,))
        assert np.array_equal(bits(rest.logits), expected)
        assert np.array_equal(rest.hidden[1], states[CHUNK:])


@pytest.mark.slow
def test_cancel_ends_a_long_forward(exported: Exporter) -> None:
    """The forward ends with CancelledError at the end of a chunk, and the next one is as if nothing had been."""
    with load(exported(n_ctx_train=1024).folder) as model:
        session = model.session(700)
        expected = bits(session.forward(TOKENS[:600], n_past=0).logits)
        with pytest.raises(CancelledError, match=f"{CHUNK} tokens are cached"):
            session.forward(TOKENS[:600], n_past=0, on_progress=lambda _: session.cancel())
        assert session.n_cached == CHUNK
        rest = session.forward(TOKENS[CHUNK:600], n_past=CHUNK)
        assert np.array_equal(bits(rest.logits), expected)


def test_onnx_runtime_stops_when_it_is_told_to(exported: Exporter) -> None:
    """What ONNX Runtime says of a run that was terminated becomes CancelledError, and nothing is counted as cached."""
    with load(exported().folder) as model:
        session = model.session(64)
        session.forward(TOKENS[:8], n_past=0)
        run = session.bound  # type: ignore[attr-defined]

        def cancelled(*arguments: Any) -> Any:
            session.cancel()
            return run(*arguments)

        session.bound = cancelled  # type: ignore[attr-defined]
        with pytest.raises(CancelledError):
            session.forward(TOKENS[8:12], n_past=8)
        assert session.n_cached == 8
        session.bound = run  # type: ignore[attr-defined]
        assert session.forward(TOKENS[8:12], n_past=8).logits.shape == (1, 260)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["suffix", "recycling+trigram", "skip"])
def test_drafts_leave_the_text_as_it_is(exported: Exporter, draft: str) -> None:
    """Pinned drafters verify drafts as chains, greedily and with sampling, and the tokens are plain decoding's."""
    folder = exported(types=("Q4_K", "Q6_K")).folder
    for temperature in (0.0, 0.9):
        texts = []
        for drafter in ("off", draft):
            with edgedec.load(folder, draft=drafter, n_threads=1, n_ctx=256) as engine:
                assert engine.card.runtime == "onnx"
                generation = engine.generate(
                    "one two one two one", max_tokens=60, seed=3, ignore_end=True, temperature=temperature
                )
                texts.append(generation.token_ids)
                assert (generation.stats.n_drafts > 0) == (drafter != "off")
        assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("n_prompt", [200, 300, 700])
def test_drafts_leave_the_text_of_a_long_prompt_as_it_is(exported: Exporter, n_prompt: int) -> None:
    """Drafts are verified in ranges of the context that were proven first, across a range's border too."""
    folder = exported(types=("Q4_K", "Q6_K")).folder
    prompt = np.resize(TOKENS[:40], n_prompt).tolist()
    texts = []
    for drafter in ("off", "suffix"):
        with edgedec.load(folder, draft=drafter, n_threads=2, n_ctx=1024) as engine:
            generation = engine.generate(prompt, max_tokens=80, seed=3, ignore_end=True, temperature=0.9)
            texts.append(generation.token_ids)
            assert (generation.stats.n_drafts > 0) == (drafter != "off")
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_trees_are_sent_in_loose_numerics_only(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter of trees has them verified as chains where the text is to stay the same."""
    shapes: list[bool] = []
    evaluate = OnnxSession.evaluate

    def noted(session: OnnxSession, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        shapes.append(item.is_tree)
        return evaluate(session, item, on_progress)

    monkeypatch.setattr(OnnxSession, "evaluate", noted)
    both: tuple[Numerics, ...] = ("strict", "loose")
    for numerics in both:
        shapes.clear()
        folder = exported(types=("Q4_K", "Q6_K")).folder
        with edgedec.load(
            folder, draft="recycling", drafting=DraftOptions(numerics=numerics), n_threads=1, n_ctx=256
        ) as engine:
            engine.generate("one two one two one", max_tokens=60, temperature=0, ignore_end=True)
        assert any(shapes) == (numerics == "loose")


@pytest.mark.slow
def test_pages_that_are_let_go_come_back(exported: Exporter) -> None:
    """Each graph knows its own mappings of the weights, and the numbers stay after their pages were given back."""
    folder = exported(types=("Q4_K",)).folder
    with load(folder) as first, load(folder) as second:
        expected = bits(first.session(16).forward(TOKENS[:8], n_past=0).logits)
        pages = [opened_of(model).mapped for model in (first, second)]
        assert not set(pages[0]) & set(pages[1])
        assert sys.platform != "linux" or all(pages)
        for model in (first, second):
            give_back(opened_of(model).mapped)
            assert np.array_equal(bits(model.session(16).forward(TOKENS[:8], n_past=0).logits), expected)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_forked_process_loads_its_own(exported: Exporter) -> None:
    """In a child the parent's model is refused and closes without waiting; another one loads and has the same bits."""
    folder = exported().folder
    with load(folder, n_threads=2) as model:
        expected = bits(model.session(64).forward(TOKENS[:20], n_past=0).logits)

        def act() -> str:
            with pytest.raises(SessionError, match="child process"):
                model.session(64)
            model.close()
            with load(folder, n_threads=2) as own:
                found = bits(own.session(64).forward(TOKENS[:20], n_past=0).logits)
            return "equal" if np.array_equal(found, expected) else "other"

        assert in_a_forked_child(act) == "equal"
        assert np.array_equal(bits(model.session(64).forward(TOKENS[:20], n_past=0).logits), expected)


def opened_of(model: Model) -> Opened:
    assert isinstance(model, OnnxModel)
    return model.handle


@pytest.mark.slow
def test_a_folder_and_its_graph_are_names_of_the_model(exported: Exporter) -> None:
    """Both are taken by auto; a GGUF is not offered to the onnx runtime, and its refusal says what to do."""
    model = exported()
    for path in (model.folder, model.folder / "model.onnx"):
        with edgedec.load(path, draft="off") as engine:
            assert (engine.card.runtime, engine.n_ctx) == ("onnx", 1024)
    assert "edgedec export" in (Onnx().accepts(model.gguf) or "")


@pytest.mark.slow
def test_options_that_it_cannot_honour_are_refused(exported: Exporter) -> None:
    """Each is a RequestError or RuntimeUnavailableError that says what there is instead."""
    folder = exported().folder
    for name, value, said in (
        ("kv_type", "q8_0", "keeps keys and values as f32"),
        ("n_gpu_layers", 3, "choose a device"),
        ("resident_bytes", 10**9, "all weights in memory"),
        ("n_threads", 0, "from 1 to 256"),
    ):
        with pytest.raises(RequestError, match=said):
            load(folder, **{name: value})
    with pytest.raises(RuntimeUnavailableError, match=r"no device 'tpu'; it knows cpu, cuda"):
        load(folder, device="tpu")
    if "CUDAExecutionProvider" not in load_library().get_available_providers():
        with pytest.raises(RuntimeUnavailableError, match="onnxruntime-gpu"):
            load(folder, device="CUDA")
    for device in ("CPU", "CPUExecutionProvider"):
        load(folder, device=device).close()


def test_the_report_tells_devices_and_why_others_are_not_there() -> None:
    """The CPU always works; every other provider works or has its reason."""
    report = Onnx().report()
    assert report.version.startswith("onnxruntime ")
    assert report.devices[0] == "cpu"
    assert len(report.devices) + len(report.notes) == 6


def test_an_operator_that_is_not_there_is_told(exported: Exporter, tmp_path: Path) -> None:
    """A graph with an operator of no known kind is UnsupportedModelError, with its name."""
    import onnx

    folder = copied(exported().folder, tmp_path)
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    graph.graph.node[-1].op_type = "NoSuchOperator"
    rewritten(folder, "model.onnx", graph.SerializeToString())
    with pytest.raises(UnsupportedModelError, match="NoSuchOperator"):
        load(folder)
