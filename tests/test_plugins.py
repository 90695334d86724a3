"""Plug-ins: edgedec's own and other packages' are found in the same way, and each group takes a stranger's."""

import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.installed import install_plugins, with_plugin

from edgedec import load, plugins
from edgedec.chat import open_template
from edgedec.choosing.choice import chooser_named
from edgedec.errors import PluginError, TemplateError
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
