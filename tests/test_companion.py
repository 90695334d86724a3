"""Methods that write on a session around the target's: found by entry point, ours as well as a stranger's."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.installed import with_plugin

import edgedec
from edgedec.companion import companion_of
from edgedec.errors import PluginError, RequestError

STRANGER = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Silent:
    """Loads a further model, and lets the target write alone."""

    other: str = ""
    role = "silent model"
    what = "a target and its silent model"

    @property
    def model(self):
        return self.other

    def session(self, target, companion):
        companion.close()
        return target
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a method, as pip would install it."""
    (tmp_path / "silent_method.py").write_text(STRANGER, encoding="utf-8")
    about = tmp_path / "silent-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: silent\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[edgedec.sessions]\nsilent = silent_method:Silent\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_strangers_method_writes(tmp_path: Path) -> None:
    """Its model is planned and loaded, its session writes, and nothing is drafted beside it."""
    target, other = tiny_llama(tmp_path / "target.gguf", seed=1), tiny_llama(tmp_path / "other.gguf", seed=2)
    keywords = {"runtime": "cpu", "n_ctx": 64, "offline": True}
    with edgedec.load(target, draft="off", **keywords) as plain:  # type: ignore[arg-type]
        expected = plain.generate("a", max_tokens=8, temperature=0)
    lossy = edgedec.Lossy(methods={"silent": {"other": str(other)}})
    with edgedec.load(target, lossy=lossy, **keywords) as engine:  # type: ignore[arg-type]
        assert engine.generate("a", max_tokens=8, temperature=0).token_ids == expected.token_ids
        assert any(term.name.startswith("silent model: ") for term in engine.plan.terms) == bool(engine.plan.terms)
    with pytest.raises(
        RequestError, match="a target and its silent model don't go together with a context that slides"
    ):
        edgedec.load(target, lossy=edgedec.Lossy(slide=True, methods={"silent": {"other": str(other)}}), offline=True)


def test_what_no_method_takes_is_refused() -> None:
    """An unknown method or option, and two methods at once."""
    assert companion_of(None) is companion_of({}) is None
    with pytest.raises(PluginError, match="no session is called 'guess'"):
        edgedec.Lossy(methods={"guess": {}})
    with pytest.raises(RequestError, match="the method switching has no option 'bits'"):
        edgedec.Lossy(methods={"switching": {"bits": 1.0}})
    with pytest.raises(RequestError, match="the method slide has no option 1"):
        companion_of({"slide": {1: 2}})  # type: ignore[dict-item]
    with pytest.raises(RequestError, match="the method slide is missing; it must be a mapping"):
        companion_of({"slide": None})  # type: ignore[dict-item]
    with pytest.raises(RequestError, match="one of them can be used at a time"):
        edgedec.Lossy(methods={"switching": {}, "guess": {}})


AROUND = '''
from dataclasses import dataclass

from edgedec.sessions.outer_session import OuterSession

@dataclass(frozen=True)
class Counting:
    """Counts the sessions that it stands around; it has no further model."""

    role = ""
    what = "a count of sessions"
    model = None
    opened = []

    def session(self, target, companion):
        assert companion is None
        self.opened.append(target)
        return OuterSession(target)
'''


def test_a_strangers_method_without_a_further_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions stand around those of all parallel requests, texts are drafted for, and no text changes."""
    (tmp_path / "counting_method.py").write_text(AROUND, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with_plugin(monkeypatch, tmp_path, "edgedec.sessions", "counting", "counting_method:Counting")
    target = tiny_llama(tmp_path / "target.gguf", seed=1)
    keywords = {"runtime": "cpu", "n_ctx": 64, "offline": True, "n_parallel": 2}
    with edgedec.load(target, draft="off", **keywords) as plain:  # type: ignore[arg-type]
        expected = plain.generate("a", max_tokens=24, temperature=0)
    lossy = edgedec.Lossy(methods={"counting": {}})
    with edgedec.load(target, lossy=lossy, draft="suffix", **keywords) as engine:  # type: ignore[arg-type]
        found = engine.generate("a", max_tokens=24, temperature=0)
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.stats.n_drafts
    opened = sys.modules["counting_method"].Counting.opened
    assert len(opened) == 2
    with edgedec.load(target, lossy=replace(lossy, slide=True), **keywords) as engine:  # type: ignore[arg-type]
        assert engine.n_ctx == 64  # and not the most tokens of a text
