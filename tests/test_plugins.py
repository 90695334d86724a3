"""Plug-ins: edgedec's own and other packages' are found in one way; each group and option takes a stranger's."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.installed import install_plugins, with_plugin

import edgedec
from edgedec import load, plugins
from edgedec.chat import open_template
from edgedec.choosing.choice import chooser_named
from edgedec.companion import companion_of
from edgedec.errors import PluginError, RequestError, TemplateError
from edgedec.grammar import GRAMMAR_BYTES, Grammar, GrammarCompiler, GrammarState
from edgedec.plugins import DISTRIBUTION
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.chat.template import ChatTemplate
from edgedec_runtimes.grammar.compiler import Llguidance

ASKED: list[str] = []


def test_own_plug_ins_are_the_entry_points_of_the_distribution() -> None:
    """Each imports, those apart that need a library of another project; an entry point may have a type in its name."""
    own = [entry for entry in metadata.distribution(DISTRIBUTION).entry_points if entry.group.startswith("edgedec.")]
    for entry in own:
        word, dot, name = entry.name.rpartition(".")
        kind = f"{entry.group}:{word}" if dot else entry.group
        assert kind in plugins.KINDS, entry
        found = plugins.plugins(kind)[name]
        assert (found.target, found.package) == (entry.value, DISTRIBUTION)
        assert plugins.load_plugin(kind, name) is not None


def test_a_name_of_ours_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package adds names to a group, after ours; the first one on the path has a name that two have."""
    first, second = ({plugins.DRAFTERS: {"suffix": "bad:X", "mine": f"{name}:X"}} for name in ("first", "second"))
    monkeypatch.syspath_prepend(install_plugins(tmp_path / "b", second, "second"))
    monkeypatch.syspath_prepend(install_plugins(tmp_path / "a", first, "first"))
    found = plugins.plugins(plugins.DRAFTERS)
    assert found["suffix"].package == DISTRIBUTION
    assert (found["mine"].target, found["mine"].package) == ("first:X", "first 1.0")
    assert list(found)[-1] == "mine"
    assert not plugins.is_own(plugins.DRAFTERS, "mine")
    with pytest.raises(PluginError, match=r"'mine' \(first:X, from first 1.0\) does not import: ModuleNotFoundError"):
        plugins.load_plugin(plugins.DRAFTERS, "mine")
    with pytest.raises(PluginError, match="no drafter is called 'nobody'; installed: suffix, "):
        plugins.load_plugin(plugins.DRAFTERS, "nobody")


def test_what_a_package_has_wrong_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of earlier versions is refused by name, unless it is in the new one, too; a damaged file is left out."""
    former = {"edgedec.choosers": {"old": "bad:X", "both": "bad:X"}, plugins.SEARCHES: {"chooser.both": "good:X"}}
    monkeypatch.syspath_prepend(install_plugins(tmp_path / "a", former))
    monkeypatch.syspath_prepend(install_plugins(tmp_path / "b", {plugins.RULES: {"no target\n#": ""}}, "damaged"))
    assert plugins.plugins(plugins.CHOOSERS)["both"].target == "good:X"
    why = "stranger 1.0 has 'old' in edgedec.choosers, which is gone; it must be \"chooser.old\" of edgedec.searches"
    with pytest.raises(PluginError, match=why):
        chooser_named("old")


@pytest.mark.slow
def test_sources_without_metadata_say_how_to_install_them() -> None:
    """A checkout on the path, without an installation, has no plug-ins."""
    folders = {str(Path(module.__file__ or "").parents[1]) for module in (sys.modules["edgedec"], sys.modules["numpy"])}
    script = (
        f"import sys; sys.path[:] = {sorted(folders)!r} + [p for p in sys.path if not p.endswith('-packages')]\n"
        "from importlib import metadata\n"
        "metadata.MetadataPathFinder.find_distributions = classmethod(lambda *_: iter(()))\n"
        "from edgedec.errors import PluginError\nfrom edgedec.plugins import DRAFTERS, load_plugin\n"
        "try: load_plugin(DRAFTERS, 'suffix')\nexcept PluginError as error: print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "without the metadata of edgedec-llm" in ended.stdout, ended.stderr
    assert "install it: pip install -e" in ended.stdout


def template(source: str, *, bos_token: str, eos_token: str) -> ChatTemplate | None:
    """A stranger's engine, which takes one kind of template."""
    if not source.startswith("upper:"):
        return None
    return ChatTemplate("{{ messages[0].content | upper }}" + eos_token, bos_token=bos_token, eos_token=eos_token)


def failing(*args: Any, **options: Any) -> None:
    """A plug-in that fails whatever it is asked."""
    ASKED.append("failing")
    raise ZeroDivisionError


@pytest.mark.slow
def test_templates_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes the templates that it knows; ours takes all others, and those of an engine that fails."""
    ASKED.clear()
    with pytest.raises(TemplateError):
        open_template("{% upper %}", bos_token="<s>", eos_token="</s>")
    with_plugin(monkeypatch, tmp_path, plugins.TEMPLATES, "upper", f"{__name__}:template")
    with_plugin(monkeypatch, tmp_path, plugins.TEMPLATES, "broken", "no_such_module:X")
    with_plugin(monkeypatch, tmp_path, plugins.TEMPLATES, "failing", f"{__name__}:failing")
    messages = [{"role": "user", "content": "a"}]
    for source, text in (("upper:", "A</s>"), ("{{ bos_token }}b", "<s>b")):
        assert open_template(source, bos_token="<s>", eos_token="</s>").render(messages) == text
    with load(tiny_llama(tmp_path / "m.gguf"), n_ctx=64, chat_template="upper:", draft="off") as model:
        assert model.requests.render(messages).startswith("A")
    assert ASKED


class Upper:
    """A stranger's grammar compiler: it notes what it compiles, and leaves the work to ours."""

    def __init__(self, tokenizer: Tokenizer, n_bytes: int = GRAMMAR_BYTES) -> None:
        self._compiler: GrammarCompiler = Llguidance(tokenizer, n_bytes)

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return the state of ours."""
        ASKED.append(grammar.kind)
        return self._compiler.compile(grammar)


def grammars(tokenizer: Tokenizer, n_bytes: int = GRAMMAR_BYTES) -> Upper | None:
    """A stranger's factory, which takes every second vocabulary that it is asked about."""
    ASKED.append("factory")
    return Upper(tokenizer, n_bytes) if ASKED.count("factory") % 2 else None


def test_grammars_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler takes the vocabularies that it knows, and ours takes all others; texts keep to the grammar."""
    ASKED.clear()
    path = tiny_llama(tmp_path / "m.gguf")
    with_plugin(monkeypatch, tmp_path, plugins.GRAMMARS, "upper", f"{__name__}:grammars")
    with_plugin(monkeypatch, tmp_path, plugins.GRAMMARS, "failing", f"{__name__}:failing")
    texts: Sequence[str] = []
    for _ in range(2):
        with load(path, n_ctx=64, draft="off") as model:
            texts = [*texts, model.generate("a", max_tokens=8, temperature=0, grammar=Grammar.regex("[0-9]{3}")).text]
    assert texts[0] == texts[1]
    assert texts[0].isdigit()
    assert ASKED == ["failing", "factory", "regex", "failing", "factory"]


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


STRANGERS_METHODS = '''
import numpy as np

from edgedec.constraint import Constraint
from edgedec.text_method import EndBefore, TextMethod

class Even(Constraint):
    """Allows the tokens of even ids alone."""

    def allowed(self, path=()):
        found = super().allowed(path).copy()
        found[1::2] = False
        return found

class Anything:
    """The grammar of all texts."""

    is_complete = False
    may_end = True
    predicate = None

    def __init__(self, n_vocab):
        self.n_vocab = n_vocab

    def allowed(self):
        return np.ones(self.n_vocab, np.bool_)

    def forced(self):
        return ()

    def advance(self, token_id):
        return True

    def back(self, n_tokens):
        pass

    def close(self):
        pass

class EvenTokens(TextMethod):
    """Texts of even token ids, where the value is True."""

    def __init__(self, tokenizer):
        self.n_vocab = tokenizer.n_vocab

    def constraint(self, value, text):
        return Even(text.state or Anything(self.n_vocab)) if value else None

class Before:
    """Ends a text before a token."""

    note = "texts end before a token"

    def __init__(self, token_id):
        self.token_id = token_id

    def before(self, row, token_id, ops):
        return EndBefore("unsure", 0.5, "there it was") if token_id == self.token_id else None

class EndsBefore(TextMethod):
    """Texts that end before the token that is the value, and are drawn greedily."""

    def __init__(self, tokenizer):
        pass

    def draw(self, value):
        return {"temperature": 0.0}

    def early_end(self, value, card):
        return Before(value)
'''


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[edgedec.Engine]:
    """A tiny model, where a package with two methods is installed."""
    (tmp_path / "strange_texts.py").write_text(STRANGERS_METHODS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with_plugin(monkeypatch, tmp_path, "edgedec.text_methods", "even", "strange_texts:EvenTokens")
    with_plugin(monkeypatch, tmp_path, "edgedec.text_methods", "ends-before", "strange_texts:EndsBefore")
    with edgedec.load(tiny_llama(tmp_path / "tiny.gguf"), runtime="cpu", n_ctx=64, draft="suffix") as found:
        yield found


def test_a_strangers_constraint(engine: edgedec.Engine) -> None:
    """All tokens of its texts are even; without the value, and with a value that asks for nothing, they need not be."""
    plain = engine.generate("ab", max_tokens=24, seed=2, ignore_end=True)
    assert any(token_id % 2 for token_id in plain.token_ids)
    off = engine.generate("ab", max_tokens=24, seed=2, ignore_end=True, methods={"even": False})
    assert off.token_ids == plain.token_ids
    found = engine.generate("ab", max_tokens=24, seed=2, methods={"even": True})
    assert found.token_ids
    assert not any(token_id % 2 for token_id in found.token_ids)
    several = engine.samples("ab", 2, max_tokens=8, seed=2, methods={"even": True})
    assert several[0].token_ids == found.token_ids[:8]


def test_a_strangers_end(engine: edgedec.Engine) -> None:
    """The text is the greedy one up to the token, which is no part of it, and the statistics say what there was."""
    greedy = engine.generate("ab", max_tokens=24, temperature=0).token_ids
    last = greedy[len(greedy) // 2]
    found = engine.generate("ab", max_tokens=24, methods={"ends-before": last})
    assert found.token_ids == greedy[: greedy.index(last)]
    assert (found.finish_reason, found.stats.chance_right) == ("unsure", 0.5)
    assert {"texts end before a token", "there it was"} <= {*found.stats.notes}


def test_methods_that_do_not_go_together(engine: edgedec.Engine) -> None:
    """Two that make a constraint, and one that nobody brings."""
    with pytest.raises(RequestError, match="json_close and even can't be combined"):
        engine.generate("ab", grammar=Grammar.regex("a+"), max_tokens=8, methods={"json_close": True, "even": True})
    with pytest.raises(PluginError, match="no text method is called 'odd'"):
        engine.generate("ab", max_tokens=8, methods={"odd": True})
