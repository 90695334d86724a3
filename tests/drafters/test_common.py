"""The drafter that knows a small text from the start."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.draft import Verification
from edgedec.drafter import DraftContext
from edgedec.drafters.suffix.common import CommonDrafter, CommonText, common_text
from edgedec.errors import CancelledError
from edgedec.load_options import LoadOptions
from edgedec.progress import CancelToken, Progress

MakeContext = Callable[..., DraftContext]


def test_it_proposes_what_mostly_followed(make_context: MakeContext) -> None:
    """Of the longest context known the most frequent continuation stands first; the text teaches it nothing."""
    text = CommonText([1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 8])
    drafter = text(make_context())
    drafter.begin([7, 1, 2])
    draft = drafter.propose(3, 1e18)
    assert list(draft.tokens) == [3, 4, 9]
    assert list(draft.parents) == [-1, -1, 0]
    for token_ids in ((7, 7, 7), (7, 7)):
        drafter.learn(Verification((), token_ids), {})
    assert len(drafter.propose(3, 1e18)) == 0


def test_without_a_text_it_proposes_nothing(make_context: MakeContext) -> None:
    """A context that holds none is fine."""
    drafter = CommonDrafter(make_context())
    drafter.begin([1, 2])
    drafter.learn(Verification((), (3,)), {})
    assert len(drafter.propose(4, 1e18)) == 0


@pytest.mark.slow
def test_its_contexts_are_made_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for them; loading says so where it takes long, and can be cancelled there."""
    monkeypatch.setattr("edgedec.progress._PATIENCE_S", -1.0)
    path, told = tiny_llama(tmp_path / "m.gguf"), list[Progress]()
    with edgedec.load(path, cache_dir=tmp_path, runtime="reference", on_progress=told.append) as engine:
        monkeypatch.setattr(CommonText, "build", None)
        engine.generate("Once", max_tokens=3)
    shown = [progress.done for progress in told if progress.detail == "everyday text"]
    assert (shown[0], shown[-1]) == (0, 100)
    assert shown == sorted(shown)
    monkeypatch.undo()
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(CancelledError, match="loading everyday text: cancelled"):
        CommonText([1, 2]).build(LoadOptions(cancel=cancel))


@pytest.mark.parametrize(("tick_s", "shown"), [(0.03, []), (0.04, [85, 100])])
def test_what_is_made_quickly_is_not_reported(monkeypatch: pytest.MonkeyPatch, tick_s: float, shown: list[int]) -> None:
    """A tenth of a second is no progress worth a line; the third look, at item 1,024, may be beyond it."""
    ticks, told = count(), list[Progress]()
    monkeypatch.setattr("edgedec.progress.monotonic", lambda: tick_s * next(ticks))
    CommonText([1, 2] * 600).build(LoadOptions(on_progress=told.append))
    assert [progress.done for progress in told] == shown


@pytest.mark.slow
def test_the_text_that_ships_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are remembered by model; a damaged cache is no matter. Of many tokens it keeps what 10 MB can hold."""
    with edgedec.load(tiny_llama(tmp_path / "m.gguf"), cache_dir=tmp_path, runtime="reference", draft="off") as engine:
        tokenizer = engine.tokenizer
        found = common_text(tokenizer, tmp_path, "a")
        assert len(found.token_ids) == 15_000
        assert 9_000_000 < found.automaton.memory_bytes() < 10_000_000
        assert tokenizer.decode(list(found.token_ids[:200])).startswith("Photosynthesis is")
        (file,) = (tmp_path / "probes").glob("common-text-*.json")
        monkeypatch.setattr(tokenizer, "encode", None)
        assert common_text(tokenizer, tmp_path, "a").token_ids == found.token_ids
        monkeypatch.undo()
        file.write_text("[-1]")
        assert common_text(tokenizer, tmp_path, "a").token_ids == found.token_ids
