"""What a recording notes of drafting: every forward that was made, and after which one each node was known."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.decoding.draft_models import TEXT, counted, loaded
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.engine import Engine
from edgedec.drafter import DrafterFactory
from edgedec.drafters.draft_model.cascade import CascadeModel
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.model import Model
from edgedec.scheduler import plugin_guard
from edgedec_apps.bench.recorder import Evaluated, Proposals, Recorder, record_text
from edgedec_methods.exit import exits_of
from edgedec_methods.overlapped import OverlappedModel
from edgedec_methods.universal import UniversalDraftModel

N_TOKENS = 24


@pytest.fixture(scope="module")
def deep(folder: Path) -> Path:
    """A model of five layers, for the cpu runtime."""
    return tiny_llama(folder / "deep.gguf", seed=1, n_layer=5, n_ctx_train=1024)


@pytest.fixture
def equal(target: Path) -> Iterator[Model]:
    """The target as a draft model; an engine closes it."""
    with loaded(target) as model:
        yield model


def opened(path: Path, draft: str | DrafterFactory, runtime: str) -> Engine:
    """Load a model with a pinned drafter, in this thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_guard, "GuardedFactory", lambda factory: factory)
        return edgedec.load(path, runtime=runtime, n_ctx=512, draft=draft, n_draft_max=8, n_threads=1)


def rows_of(engine: Engine, path: Path) -> tuple[Proposals, ...]:
    """DrafterRecord after TEXT; shares are those of the file's bytes."""
    recorder = Recorder(layer_bytes(path).share)
    record_text(engine, TEXT, recorder, max_tokens=N_TOKENS, temperature=0, ignore_end=True)
    assert len(recorder.rows) == N_TOKENS - 2  # neither before the first token nor before the last
    return tuple(recorder.rows)


def depths(row: Proposals) -> tuple[int, ...]:
    """Return how deep each node stands."""
    found: list[int] = []
    for parent in row.parents:
        found.append(1 + (found[parent] if parent >= 0 else 0))
    return tuple(found)


def test_tables_evaluate_nothing(deep: Path) -> None:
    """What suffix proposes was known after no forward."""
    with opened(deep, "suffix", "cpu") as engine:
        rows = rows_of(engine, deep)
    assert any(row.tokens for row in rows)
    assert all(row.evaluated == () and row.after == (0,) * len(row.tokens) for row in rows)


@pytest.mark.slow
def test_a_drafter_that_is_never_verified_is_still_asked_at_every_position(deep: Path) -> None:
    """Nothing is verified while drafts are recorded, so no drafter rests for want of use as it does in decoding."""
    with edgedec.load(deep, runtime="cpu", n_ctx=512, n_threads=1) as engine:
        recorder = Recorder()
        found = record_text(engine, TEXT, recorder, max_tokens=120, temperature=0, ignore_end=True)
    repeats = [i for i in range(40, 118) if found.token_ids[i] in found.token_ids[:i]]
    assert len(repeats) > 24
    assert all(recorder.rows[i].tokens for i in repeats)


def test_a_drafter_of_own_layers_takes_a_forward_a_level(deep: Path) -> None:
    """One row each, of the share that four of five layers and the head are of a token's bytes."""
    sizes = layer_bytes(deep)
    share = (sizes.total - int(sizes.halves[2].sum())) / sizes.total
    with opened(deep, "skip", "cpu") as engine:
        rows = rows_of(engine, deep)
    for row in rows:
        assert row.after == depths(row)
        assert row.evaluated == (Evaluated(1, share),) * max(row.after)


def test_cheap_proposals_are_known_before_the_costly_ones(deep: Path) -> None:
    """Beside suffix, only what skip adds to the tree took forwards."""
    with opened(deep, "suffix", "cpu") as engine:
        alone = rows_of(engine, deep)
    with opened(deep, "suffix+skip", "cpu") as engine:
        rows = rows_of(engine, deep)
    assert [tuple(row.tokens[: row.after.count(0)]) for row in rows] == [row.tokens for row in alone]
    assert all(row.after == tuple(sorted(row.after)) and max(row.after) <= len(row.evaluated) for row in rows)
    assert sum(len(row.tokens) for row in rows) > sum(len(row.tokens) for row in alone)


def test_exit_drafts_whatever_it_costs_and_its_judging_is_noted(deep: Path) -> None:
    """Where a text gets next to no draft of it, a recording has one at every position; eight are judged at first."""
    n_exits, sizes = len(exits_of(5)), layer_bytes(deep)
    with opened(deep, "exit", "cpu") as engine:
        made = engine.generate(TEXT, max_tokens=N_TOKENS, temperature=0, ignore_end=True).stats
        assert made.n_drafts <= 2  # on a busy machine a trial may be made
    with opened(deep, "exit", "cpu") as engine:
        rows = rows_of(engine, deep)
    judged = Evaluated(n_exits, sizes.rest / sizes.total)
    for row in rows:
        n_judged = int(row.evaluated[0] == judged)
        assert row.after == tuple(n_judged + depth for depth in depths(row))
        assert all(made.n_rows == 1 for made in row.evaluated[n_judged:])
        assert len(row.evaluated) == max(row.after)
    assert [row.evaluated[0] == judged for row in rows[:8]] == [True] * 8
    assert sum(row.evaluated[0] == judged for row in rows) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("way", [DraftModel, OverlappedModel, UniversalDraftModel, CascadeModel])
def test_a_draft_models_forwards_are_all_noted(target: Path, equal: Model, way: Callable[..., DrafterFactory]) -> None:
    """As many, of as many rows, as its session was asked for; and none in a generation that is not recorded."""
    source = OverlappedModel(equal) if way is OverlappedModel else DraftModel(equal)
    factory: DrafterFactory = source
    if way is CascadeModel:
        factory = CascadeModel(source)
    elif way is UniversalDraftModel:
        universal = UniversalDraftModel(equal)
        factory, source = universal, universal.source
    session = counted(source)
    with opened(target, factory, "reference") as engine:
        rows = rows_of(engine, target)
        made = [one for row in rows for one in row.evaluated]
        assert len(made) == session.n_forwards > len(rows)
        assert sum(one.n_rows for one in made) == len(session.prefixes)
        assert {one.share for one in made} == {None}
        assert all(max(row.after, default=0) <= len(row.evaluated) for row in rows)
        if way in (DraftModel, OverlappedModel):
            assert all(row.after == depths(row) for row in rows)
        engine.generate(TEXT, max_tokens=4, temperature=0)
        assert source.texts[0].recorder is None
