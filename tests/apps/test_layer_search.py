"""The search for half-layers, and the set on the disk: scores as defined, the same set again, no foreign one."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.draft_models import TEXT
from support.models.tiny_models import BOS, byte_ids, tiny_llama

from edgedec.errors import CancelledError, CapabilityError, RequestError, SessionError, StorageError
from edgedec.gguf.layer_bytes import LayerBytes, layer_bytes
from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem, LayerSet, Model, Session
from edgedec.model_card import Capabilities
from edgedec_apps.evaluation.layer_judge import Judge
from edgedec_apps.evaluation.layer_search import first_layers, late_layers, n_searched, search
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.layer_skip.layer_sets import TunedSet, keep_tuned_set, left_out, tuned_set, without

N_LAYER = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "target.gguf"
    return tiny_llama(path, seed=3, n_layer=N_LAYER, n_ff=96, n_ctx_train=1024)


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    """The target on the cpu runtime."""
    with Cpu().load(target, LoadOptions(n_ctx=256, n_threads=1)) as model:
        yield model


def windows() -> list[NDArray[np.int32]]:
    """Return two windows of a text, the second longer than a forward."""
    ids = byte_ids(TEXT * 2)
    return [np.array([BOS, *ids[:30]], np.int32), np.array([BOS, *ids[30:110]], np.int32)]


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return found


def whole_rows(session: Session, layers: LayerSet) -> NDArray[np.float64]:
    """Return the log-probabilities of all rows but the first eight of each window, all of which go through a set."""
    parts = [session.forward(w, n_past=0, layers=layers, rows="all").logits[8:].copy() for w in windows()]
    return log_softmax(np.concatenate(parts))


def draft_rows(session: Session, layers: LayerSet) -> NDArray[np.float64]:
    """The same, where each row alone goes through the set, behind a prefix of the whole model's."""
    rows = []
    for window in windows():
        for i in range(8, len(window)):
            session.forward(window[:i], n_past=0)
            rows.append(session.forward(window[i : i + 1], n_past=i, layers=layers).logits[0].copy())
    return log_softmax(np.array(rows))


@pytest.mark.slow
@pytest.mark.parametrize(("as_drafts", "rows_of"), [(False, whole_rows), (True, draft_rows)], ids=["whole", "drafts"])
def test_the_scores_are_those_of_plain_numpy(
    model: Model, as_drafts: bool, rows_of: Callable[[Session, LayerSet], NDArray[np.float64]]
) -> None:
    """Agreement, overlap and KL over all rows but the first eight of each window, tokens below the first 64 as one."""
    layers = without(N_LAYER, [(1, 1), (3, 0)])
    session = model.session(256)
    rows = [whole_rows(session, without(N_LAYER, [])), rows_of(session, layers)]
    p, q = np.exp(rows[0]), np.exp(rows[1])
    top = np.argsort(-p, axis=1)[:, :64]
    p, q = (np.take_along_axis(one, top, axis=1) for one in (p, q))
    p, q = (np.concatenate([one, 1 - one.sum(axis=1, keepdims=True)], axis=1) for one in (p, q))
    found = Judge(session, windows(), as_drafts=as_drafts).score(layers)
    assert found.n_positions == len(p) == 23 + 73
    assert found.agreement == (rows[0].argmax(axis=1) == rows[1].argmax(axis=1)).mean()
    assert found.overlap == pytest.approx(np.minimum(p, q).sum(axis=1).mean(), rel=1e-5)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-5)


BOTH_WAYS = pytest.mark.parametrize("as_drafts", [False, True], ids=["whole", "drafts"])


@BOTH_WAYS
def test_the_whole_model_agrees_with_itself(model: Model, as_drafts: bool) -> None:
    """With a distance of exactly nothing."""
    score = Judge(model.session(256), windows(), as_drafts=as_drafts).score(without(N_LAYER, []))
    assert (score.agreement, score.kl) == (1.0, 0.0)
    assert score.overlap == pytest.approx(1.0, abs=1e-9)


@pytest.mark.slow
@BOTH_WAYS
def test_a_shared_beginning_changes_no_score(model: Model, as_drafts: bool) -> None:
    """Going on from the states before the first difference gives what the whole way gives, for less."""
    judge = Judge(model.session(256), windows(), as_drafts=as_drafts)
    n_rows = 23 + 73 if as_drafts else judge.n_tokens
    base = judge.trace(without(N_LAYER, [(1, 0)]))
    assert base.score == judge.score(base.layers)
    for other in ([(1, 0), (3, 1)], [(1, 0), (2, 0)], [(2, 1)], [(1, 0)]):
        layers = without(N_LAYER, other)
        before = judge.spent
        shared = judge.score(layers, base)
        spent = judge.spent - before
        assert astuple(shared) == pytest.approx(astuple(judge.score(layers)), rel=1e-5)
        whole, resumed = judge.trace(layers), judge.trace(layers, base)
        assert astuple(resumed.score) == pytest.approx(astuple(whole.score), rel=1e-5)
        for one, other_way in zip(whole.hidden, resumed.hidden, strict=True):
            assert np.allclose(one, other_way, atol=1e-4)
        assert spent == pytest.approx(n_rows * {3: 2 / 5, 2: 3 / 5, 1: 4 / 5, 5: 0}[_first(other)])


def test_a_draft_is_scored_nearer_than_a_text_without_a_verification(model: Model) -> None:
    """What stands before it was written by the whole model; and windows are scored alike whichever came before."""
    layers = without(N_LAYER, [(1, 0), (2, 1)])
    session = model.session(256)
    drafts = Judge(session, windows(), as_drafts=True)
    first = drafts.score(layers)
    assert first.kl < Judge(session, windows()).score(layers).kl
    session.forward(np.array(byte_ids("another text"), np.int32), n_past=0)
    assert drafts.score(layers) == first
    assert drafts.score(layers, n_rows=24).n_positions == 23 + 24
    drafts.close()
    with pytest.raises(SessionError):
        drafts.score(layers)
    session.forward(np.array([BOS], np.int32), n_past=0)


def _first(other: list[tuple[int, int]]) -> int:
    """Return the first layer in which a set differs from the one without the attention of layer 1."""
    return min((layer for layer, _ in set(other) ^ {(1, 0)}), default=N_LAYER)


def found_with(model: Model, sizes: LayerBytes, **options: Any) -> tuple[list[tuple[int, int]], int]:
    """Search; return what is left out, and how many sets were scored."""
    found = search(Judge(model.session(256), windows(), as_drafts=True), sizes, n_anew=3, **options)
    return left_out(found.layers), found.n_scored


@pytest.mark.slow
def test_the_same_text_finds_the_same_set(model: Model, target: Path) -> None:
    """In as many evaluations; it leaves out enough, and neither the first layer nor the last."""
    sizes = layer_bytes(target)
    first, again = (found_with(model, sizes) for _ in range(2))
    assert first == again
    out, n_scored = first
    assert sizes.share(without(N_LAYER, out)) <= 0.8
    assert {layer for layer, _ in out} <= {1, 2, 3}
    assert 6 < n_scored < 40


def test_a_half_layer_that_does_nothing_goes_first(model: Model, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one can be left out for nothing, the set is that one and no other."""

    def without_effect(self: Judge, layers: LayerSet, *others: Any) -> Any:
        return original(self, LayerSet(layers.attn, layers.mlp | (np.arange(N_LAYER) == 2)), *others)

    original = Judge.score
    monkeypatch.setattr(Judge, "score", without_effect)
    judge = Judge(model.session(256), windows())
    found = search(judge, layer_bytes(target), n_anew=6, least_saved=0.05)
    assert (2, 1) in left_out(found.layers)


def test_a_limit_ends_the_search_with_what_it_has(model: Model, target: Path) -> None:
    """It says so; what is found is a set all the same."""
    calls: list[int] = []
    judge = Judge(model.session(256), windows())
    found = search(judge, layer_bytes(target), n_anew=3, is_over=lambda: len(calls) >= 8, on_scored=calls.append)
    assert (found.ended, found.n_scored) == (True, 8)
    assert len(left_out(found.layers)) <= 2


def test_a_search_can_be_cancelled(model: Model) -> None:
    """Before any forward."""

    def cancelled() -> None:
        raise CancelledError("cancelled")

    with pytest.raises(CancelledError):
        Judge(model.session(256), windows(), cancelled)


def test_a_forward_over_forks_can_be_stopped(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told to stop is one of the sessions in it; where none runs, nothing is."""
    judge = Judge(model.session(256), windows(), as_drafts=True)
    forward, stopped, asked = type(model).forward, list[Session](), list[Session]()

    def watched(self: Model, items: Sequence[ForwardItem]) -> list[Forward]:
        monkeypatch.setattr(type(items[0].session), "cancel", lambda session: stopped.append(session))
        asked.append(items[0].session)
        judge.cancel()
        return forward(self, items)

    monkeypatch.setattr(type(model), "forward", watched)
    judge.score(without(N_LAYER, [(2, 1)]))
    judge.cancel()
    assert stopped == asked != []
    judge.close()


def test_a_runtime_that_runs_all_layers_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the capability's name; one that can't fork can't judge drafts."""
    monkeypatch.setattr(model, "capabilities", Capabilities(taps=True, hidden_input=True))
    with pytest.raises(CapabilityError, match="'layers'"):
        Judge(model.session(8), windows())
    monkeypatch.setattr(model, "capabilities", Capabilities(layers=True, taps=True, hidden_input=True))
    with pytest.raises(CapabilityError, match="'fork'"):
        Judge(model.session(8), windows(), as_drafts=True)


# Sets


def test_bytes_are_those_of_the_files_tensors(target: Path) -> None:
    """By half-layer: norms, projections; the head and the last norm always count, the embedding does not."""
    sizes = layer_bytes(target)
    n_embd, n_ff, n_kv, n_vocab = 64, 96, 32, 260
    attn = 4 * (n_embd + 2 * n_embd * n_embd + 2 * n_embd * n_kv)
    mlp = 4 * (n_embd + 3 * n_embd * n_ff)
    assert sizes.halves.tolist() == [[attn, mlp]] * N_LAYER
    assert sizes.rest == 4 * (n_embd + n_embd * n_vocab)
    assert sizes.share(first_layers(N_LAYER, 2)) == pytest.approx((2 * (attn + mlp) + sizes.rest) / sizes.total)
    assert left_out(late_layers(N_LAYER, 2)) == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert [n_searched(n_bytes) for n_bytes in (10**8, 4 * 10**8, 10**9)] == [256, 192, 128], "the smaller, the more"


def test_a_file_without_layers_is_refused(tmp_path: Path) -> None:
    """Which half-layer reads what is unknown."""
    from support.models.gguf_writer import write_gguf

    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {"a": np.zeros((2, 3), np.float32)})
    with pytest.raises(RequestError, match="blk"):
        layer_bytes(path)


KEPT = TunedSet(without(N_LAYER, [(1, 1), (3, 0)]), 0.8, 0.85, 0.9, 2000)


def same(found: TunedSet | None, expected: TunedSet) -> bool:
    """Return whether two sets are one."""
    return (
        found is not None
        and left_out(found.layers) == left_out(expected.layers)
        and replace(found, layers=expected.layers) == expected
    )


def test_a_set_is_kept_by_model(model: Model, tmp_path: Path) -> None:
    """It comes back as it was; another model has none, not even where the file was copied."""
    assert tuned_set(tmp_path, model.card) is None
    keep_tuned_set(tmp_path, model.card, KEPT)
    assert same(tuned_set(tmp_path, model.card), KEPT)
    assert tuned_set(tmp_path, model.card, lossy=True) is None
    other = replace(model.card, fingerprint="another")
    assert tuned_set(tmp_path, other) is None
    keep_tuned_set(tmp_path, other, KEPT)
    ours, theirs = sorted((tmp_path / "probes").iterdir(), key=lambda path: "another" in path.read_text())
    theirs.write_bytes(ours.read_bytes())
    assert tuned_set(tmp_path, other) is None
    assert same(tuned_set(tmp_path, model.card), KEPT)


@pytest.mark.parametrize(
    "damage",
    [
        {"attn": [1] * (N_LAYER - 1)},
        {"mlp": [2] * N_LAYER},
        {"mlp": "11111"},
        {"share": 0},
        {"share": float("nan")},
        {"cost": -1},
        {"cost": "0.5"},
        {"agreement": 1.5},
        {"agreement": None},
        {"n_positions": 0},
        {"n_positions": True},
        {"fingerprint": 3},
        None,
    ],
    ids=str,
)
def test_a_damaged_set_is_none(model: Model, tmp_path: Path, damage: dict[str, Any] | None) -> None:
    """Whatever is wrong with the file; the drafter goes on as without one."""
    keep_tuned_set(tmp_path, model.card, KEPT)
    (path,) = (tmp_path / "probes").iterdir()
    path.write_text("[" if damage is None else json.dumps(json.loads(path.read_text()) | damage))
    assert tuned_set(tmp_path, model.card) is None


def test_a_set_that_cannot_be_written_is_told(model: Model, tmp_path: Path) -> None:
    """Where the cache's folder is a file."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="writable"):
        keep_tuned_set(tmp_path / "file", model.card, KEPT)
