"""Asking for a draft model that goes on while the target verifies: what is loaded, refused, and told."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.decoding.draft_models import TEXT, loaded, tiny
from support.models.real_models import real_model
from support.models.spelled import Spelled
from support.processes.command_line import run_here
from support.processes.installed import with_plugin

import edgedec
from edgedec import plugins
from edgedec.api.options import DraftOptions
from edgedec.drafter import DrafterFactory
from edgedec.drafters.draft_model.cascade import CascadeModel
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.errors import RequestError
from edgedec.load_options import LoadOptions
from edgedec.loading.second_model import LoadedDraft, companion_options, draft_model_options, open_draft_model
from edgedec.model import Model
from edgedec.scheduler.drafter_factories import require_overlap, with_draft_model
from edgedec_methods.overlapped import OverlappedModel


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    with loaded(tiny(tmp_path, 1)) as found:
        yield found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread draft all that it may before the target verifies, however busy the machine is."""
    start = OverlappedModel.start

    def start_and_wait(self: OverlappedModel, user: object, step: Callable[[], bool]) -> None:
        start(self, user, step)
        self.threads[user][0].join()

    monkeypatch.setattr(OverlappedModel, "start", start_and_wait)


@pytest.mark.parametrize(
    ("draft", "with_model", "found"),
    [
        ("auto", False, "suffix + common"),
        ("suffix", True, "suffix"),
        ("cascade", True, "cascade"),
        ("model+cascade", True, "model + cascade"),
    ],
)
def test_it_takes_a_draft_model_that_drafts(tiny_path: Path, draft: str, with_model: bool, found: str) -> None:
    """Without one, or under a drafter that does not overlap, loading says what was found and what to give."""
    model = tiny_path if with_model else None
    with pytest.raises(RequestError, match=f"draft_model.*found {re.escape(found)};"):
        edgedec.load(
            tiny_path, runtime="reference", draft=draft, draft_model=model, drafting=DraftOptions(overlap=True)
        )
    require_overlap(["suffix", "model"])


def test_auto_drafts_with_the_model_itself(model: Model) -> None:
    """Not with a cascade, as it does where nothing overlaps."""
    auto: dict[str, DrafterFactory] = {"suffix": SuffixDrafter, "model": SuffixDrafter}
    for source, expected in ((OverlappedModel(model), OverlappedModel), (DraftModel(model), CascadeModel)):
        filled = list(with_draft_model(auto, source, pinned=False).values())
        assert filled[0] is SuffixDrafter
        assert type(filled[1]) is expected


def test_the_draft_model_runs_on_the_cpu_whatever_the_target_runs_on(tiny_path: Path) -> None:
    """The target's device and layers on a GPU are not its own; one with another tokenizer is refused, and closed."""
    elsewhere = LoadOptions(device="npu", n_gpu_layers=3)
    options = draft_model_options(elsewhere, overlap=True)
    assert options == replace(draft_model_options(LoadOptions()), n_gpu_layers=0)
    with loaded(tiny_path) as target:
        source = open_draft_model(tiny_path, target, elsewhere, overlap=True)
        assert isinstance(source, OverlappedModel)
        assert source.model.card.runtime == "cpu"
        source.close()
    with pytest.raises(RequestError, match=r"tokenizer is not the target's.*leave draft_overlap out"):
        open_draft_model(tiny_path, Spelled(["a"]).model({}), elsewhere, overlap=True)


def lent(loaded: LoadedDraft) -> DraftModel | None:
    """Draft for one text at a time with a model of the target's tokenizer: a way of another package."""
    return DraftModel(loaded.model, 1) if loaded.same_tokenizer else None


def broken(loaded: LoadedDraft) -> DraftModel:
    """Fail, as a way of another package may."""
    raise ZeroDivisionError


@pytest.mark.parametrize(("way", "most"), [("lent", 1), ("broken", 5)])
def test_another_package_may_say_how_a_draft_model_drafts(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, most: int
) -> None:
    """It is asked first; one that fails is passed over."""
    with_plugin(monkeypatch, tmp_path, plugins.DRAFT_MODELS, way, f"{__name__}:{way}")
    with loaded(tiny_path) as target:
        source = open_draft_model(tiny_path, target, LoadOptions(), most=5)
        assert source.source.most == most
        source.close()


def test_a_second_model_stays_on_this_machine() -> None:
    """The servers are the target's, and so is a number of layers, as servers have some; all or none holds for both."""
    for n_gpu_layers, own in ((None, None), (5, None), (-1, -1), (0, 0)):
        target = LoadOptions(machines=("127.0.0.1:1",), n_gpu_layers=n_gpu_layers)
        for options in (draft_model_options(target), companion_options(target)):
            assert (options.machines, options.n_gpu_layers) == ((), own)
        assert draft_model_options(target, overlap=True).n_gpu_layers == 0
    assert draft_model_options(LoadOptions(n_gpu_layers=5)).n_gpu_layers == 5


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_command_line_says_what_was_used(tiny_path: Path) -> None:
    """overlap changes no text; --explain --verbose tells of the tokens drafted ahead; the prompt is read whole."""
    shared = ("run", tiny_path, TEXT[:40], "--raw", "--runtime", "reference", "-t0", "-n24", "--method=ignore-end")
    plain = run_here(*shared, "--draft", "off")
    model = ("--draft", "model", "--draft-option", f"model={tiny_path}")
    found = run_here(*shared, *model, "--draft-option", "overlap=yes", "--explain", "-v")
    assert (found.code, plain.code) == (0, 0)
    assert found.out == plain.out != b""
    assert re.search(r"model: [1-9]\d* tokens drafted while the target verified, [1-9]\d* used", found.err)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("patient")
def test_a_real_model_drafts_for_itself() -> None:
    """The 135M model on the cpu runtime: the same text, greedy and with a seed, and what was ready is used."""
    path = real_model("smollm2-135m.gguf")
    options: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 5}]
    ways: list[dict[str, Any]] = [
        {"draft": "off"},
        {"draft": "model", "draft_model": path, "drafting": DraftOptions(overlap=True)},
    ]
    texts = []
    for way in ways:
        with edgedec.load(path, runtime="cpu", n_ctx=256, n_draft_max=6, offline=True, **way) as engine:
            found = [engine.generate(TEXT, max_tokens=32, ignore_end=True, **option) for option in options]
        texts.append([generation.token_ids for generation in found])
    assert texts[0] == texts[1]
    for generation in found:
        counts = generation.stats.drafters["model"]
        assert 0 < counts["used"] <= counts["ahead"]
        assert generation.stats.reasons == []
