"""The onnx runtime runs graphs as optimum exports them: exactly, within the contract, and nothing outside of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance.memory_reading import probe_of
from support.conformance.runtime import check_runtime
from support.models.foreign_graphs import N_CTX, counting_graph, counting_logits, write_foreign
from support.models.onnx_exports import copied, load, manifest, rewritten
from support.processes.command_line import run_here

from edgedec.errors import CancelledError, CapabilityError, ModelFormatError, RequestError, UnsupportedModelError
from edgedec.model import Model, Session
from edgedec.testing import raise_failures
from edgedec_runtimes.onnx.feeds import CHUNK
from edgedec_runtimes.onnx.foreign.contract import Contract, Port, read_contract
from edgedec_runtimes.onnx.foreign.model import ForeignModel
from edgedec_runtimes.onnx.runtime import Onnx

onnx = pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")

TOKENS = np.random.default_rng(0).integers(0, 260, N_CTX).astype(np.int32)
EXPECTED = counting_logits(TOKENS.tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The counting model as an export by way of optimum."""
    return write_foreign(tmp_path_factory.mktemp("foreign") / "export", counting_graph())


@pytest.mark.slow
def test_it_conforms(folder: Path) -> None:
    """Every check that applies passes, memory as counted in another process among them."""
    probe = probe_of("onnx", folder)
    results = check_runtime(lambda: load(folder), memory_probe=probe)
    raise_failures(results)
    skipped = {result.name for result in results if result.status == "skipped"}
    assert {"trees_equal_their_chains", "layer_subsets_skip", "hidden_states_resume"} <= skipped
    assert not {"forks_share_and_diverge", "batch_invariance_holds", "memory_is_as_planned"} & skipped


def check(session: Session, n_past: int, n: int) -> None:
    """Assert that a chain after n_past tokens has the logits computed by hand, in all rows."""
    found = session.forward(TOKENS[n_past : n_past + n], n_past=n_past, rows="all").logits
    assert np.array_equal(found, EXPECTED[n_past : n_past + n]), (n_past, n)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_logits_are_those_computed_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padded: bool, positions: bool
) -> None:
    """Prefills, steps, drafts and going back, up to the last slot; a row that fills up changes none."""
    monkeypatch.setattr("edgedec_runtimes.onnx.foreign.model.one_row_is_exact", lambda *_: not padded)
    with load(write_foreign(tmp_path / "export", counting_graph(positions=positions)), n_ctx=N_CTX) as model:
        assert isinstance(model, ForeignModel)
        assert model.is_padded == padded
        session = model.session(N_CTX)
        for n_past, n in ((0, 1), (1, 1), (2, 5), (4, 1), (5, 16), (3, 200), (203, 2), (204, 1), (0, 3), (3, 250)):
            check(session, n_past, n)
        check(session, 253, 250)
        check(session, 503, N_CTX - 504)
        check(session, N_CTX - 1, 1)
        assert session.n_cached == session.n_ctx == N_CTX


def test_forks_and_saved_states_go_their_own_ways(folder: Path) -> None:
    """Arrays are shared by reference and written by nobody; a saved state is what was cached, not what was dropped."""
    with load(folder) as model:
        first = model.session(128)
        check(first, 0, 20)
        twin = first.fork()
        first.forward(TOKENS[100:105], n_past=10)
        data = twin.save()
        check(twin, 20, 5)
        check(twin, 12, 30)
        restored = model.session(128)
        restored.load(data, 20)
        check(restored, 20, 4)
        with pytest.raises(ModelFormatError, match="is not one of 19 tokens"):
            restored.load(data, 19)


@pytest.mark.slow
def test_rows_are_counted_as_invariant(folder: Path) -> None:
    """Whole numbers add up in any order, so that no second row is needed and 16 rows equal single steps."""
    with load(folder) as model:
        assert isinstance(model, ForeignModel)
        assert (model.is_padded, model.batch_invariant) == (False, 16)


def test_cancel_ends_a_long_forward(folder: Path) -> None:
    """At the end of a chunk, which stays; what is left goes on from there."""
    with load(folder) as model:
        session = model.session(N_CTX)
        with pytest.raises(CancelledError, match=f"{CHUNK} tokens are cached"):
            session.forward(TOKENS[:300], n_past=0, on_progress=lambda _: session.cancel())
        assert session.n_cached == CHUNK
        check(session, CHUNK, 40)


def test_what_the_graph_has_no_inputs_for_is_refused(folder: Path) -> None:
    """Trees, layers and taps by CapabilityError; sessions beyond the positions that there are by RequestError."""
    with load(folder) as model:
        session = model.session(64)
        asked: list[dict[str, Any]] = [{"parents": np.array([-1, -1], np.int32)}, {"taps": (0,)}]
        for options in asked:
            with pytest.raises(CapabilityError):
                session.forward(TOKENS[:2], n_past=0, **options)
        refused_by_session(model, N_CTX + 1)
    for option, value, said in (("n_ctx", N_CTX + 1, f"1 to {N_CTX} tokens"), ("kv_type", "q8_0", "values as f32")):
        with pytest.raises(RequestError, match=said):
            load(folder, **{option: value})


def refused_by_session(model: Model, n_ctx: int) -> None:
    """Assert that a session of so many tokens is refused."""
    with pytest.raises(RequestError, match=f"n_ctx is {n_ctx}; a session of this export holds 1 to {N_CTX} tokens"):
        model.session(n_ctx)


def test_it_gives_a_draft_head_nothing_to_read(folder: Path) -> None:
    """A head that is named is refused with the reason, and none is looked for."""
    assert not Onnx().draft_head_kinds(folder)
    with pytest.raises(RequestError, match=r"does not return the hidden states that a draft head reads; .* draft_head"):
        load(folder, draft_head=folder)


def test_its_folder_is_a_model(folder: Path) -> None:
    """auto takes it, and info names its kind."""
    assert Onnx().accepts(folder) is None
    result = run_here("info", folder, "--json")
    assert result.code == 0, result
    found = json.loads(result.out)
    assert (found["quantization"], found["runtime_chosen"]) == ("ONNX export for cpu, float32, KV cache f32", "onnx")


def ports(**changes: Port | None) -> list[Port]:
    """Return the inputs and outputs of a sound graph of one layer, with changes by name (dots are _)."""
    cache = ("batch", 3, "past", 8)
    found = {
        "input_ids": Port("input_ids", "tensor(int64)", ("batch", "n")),
        "attention_mask": Port("attention_mask", "tensor(int64)", ("batch", "all")),
        "past_key": Port("past_key_values.0.key", "tensor(float)", cache),
        "past_value": Port("past_key_values.0.value", "tensor(float)", cache),
        "logits": Port("logits", "tensor(float)", ("batch", "n", 99)),
        "present_key": Port("present.0.key", "tensor(float)", cache),
        "present_value": Port("present.0.value", "tensor(float)", cache),
    }
    return [port for port in (found | changes).values() if port is not None]


def contract_of(given: list[Port]) -> Contract:
    """Read a contract from ports of which those from logits on are the outputs."""
    at = next((i for i, port in enumerate(given) if port.name in ("logits", "present.0.key")), len(given))
    return read_contract(given[:at], given[at:])


def test_a_contract_is_read() -> None:
    """Sizes come from the KV cache and the logits; position_ids may be there or not."""
    assert contract_of(ports()) == Contract(1, 3, 8, 99, has_positions=False)
    free = Port("logits", "tensor(float)", ("batch", "n", "vocab"))
    assert contract_of(ports(logits=free)).n_vocab is None
    given = [Port("position_ids", "tensor(int64)", (1, None)), *ports()]
    assert contract_of(given).has_positions


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"past_key": None, "past_value": None}, "exported without a KV cache"),
        ({"past_value": None}, "lacks the input 'past_key_values.0.value'"),
        ({"attention_mask": None}, "lacks the input 'attention_mask'"),
        ({"present_value": None}, "lacks the output 'present.0.value'"),
        ({"logits": None}, "lacks the output 'logits'"),
        ({"input_ids": Port("input_ids", "tensor(int32)", (1, "n"))}, r"input_ids is tensor\(int32\)"),
        ({"input_ids": Port("input_ids", "tensor(int64)", (1, 128))}, "any number of tokens"),
        ({"input_ids": Port("input_ids", "tensor(int64)", (4, "n"))}, "a batch of 1"),
        ({"logits": Port("logits", "tensor(float16)", (1, "n", 99))}, r"logits is tensor\(float16\)"),
        ({"past_key": Port("past_key_values.0.key", "tensor(float16)", (1, 3, "p", 8))}, r"tensor\(float16\)"),
        ({"past_key": Port("past_key_values.0.key", "tensor(float)", (1, 3, 64, 8))}, "any number of tokens"),
        ({"past_key": Port("past_key_values.0.key", "tensor(float)", (1, 3, "p", 9))}, "expected the same for all"),
        ({"past_key": Port("past_key_values.0.key", "tensor(float)", (1, "p", 8))}, "expected 4 axes"),
        ({"attention_mask": Port("encoder_outputs", "tensor(float)", (1,))}, "lacks the input 'attention_mask'"),
    ],
)
def test_other_graphs_are_refused(changes: dict[str, Port | None], said: str) -> None:
    """By what is missing, or of another type or shape."""
    with pytest.raises(UnsupportedModelError, match=said):
        contract_of(ports(**changes))


def test_an_input_of_unknown_meaning_is_refused() -> None:
    """Such as the switch of merged decoders."""
    switch = Port("use_cache_branch", "tensor(bool)", (1,))
    with pytest.raises(UnsupportedModelError, match="it has the input 'use_cache_branch'"):
        contract_of([switch, *ports()])


def graph_with_a_switch() -> Any:
    return counting_graph(more_inputs=[onnx.helper.make_tensor_value_info("use_cache_branch", 9, [1])])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (graph_with_a_switch, "model.onnx: it has the input 'use_cache_branch'"),
        (lambda: counting_graph(half_caches=True), r"model.onnx: past_key_values.0.key is tensor\(float16\)"),
    ],
)
def test_a_graph_that_was_exchanged_is_refused(
    folder: Path, tmp_path: Path, make: Callable[[], Any], said: str
) -> None:
    """Its inputs are looked at when it is opened, whatever the manifest says."""
    copy = copied(folder, tmp_path)
    rewritten(copy, "model.onnx", make().SerializeToString())
    with pytest.raises(UnsupportedModelError, match=said):
        load(copy)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"n_layer": 3}, "sizes are not those"), ({"n_vocab": 9}, "sizes are not"), ({"head_dim": 4}, "sizes are not")],
)
def test_a_manifest_of_another_graph_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, int], said: str
) -> None:
    """Its sizes are compared with the graph's."""
    copy = copied(folder, tmp_path)
    (copy / "edgedec.json").write_text(json.dumps(manifest(copy) | change), encoding="utf-8")
    with pytest.raises(ModelFormatError, match=said):
        load(copy)


def test_an_export_of_an_unknown_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    """A later edgedec may make others."""
    copy = copied(folder, tmp_path)
    (copy / "edgedec.json").write_text(json.dumps(manifest(copy) | {"kind": "other"}), encoding="utf-8")
    assert "an export of the kind 'other'" in (Onnx().accepts(copy) or "")
