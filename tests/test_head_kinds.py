"""The draft head of a model is found beside it, among those trained here, and among the shipped ones; kinds by name."""

import gc
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.heads.tiny_heads import TinyHead, write_head
from support.heads.tiny_nextn import write_nextn
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import Tiny
from support.processes.command_line import run_here
from support.processes.installed import with_plugin

import edgedec
from edgedec import plugins
from edgedec.cost_curve import DraftPrice, SharedForward
from edgedec.errors import UnsupportedModelError
from edgedec.gguf import file as gguf_file
from edgedec.gguf.file import read_gguf
from edgedec.head_kinds import HeadDescription, HeadKind, Kinship, find_head, kind_of, require_fit, usable_head
from edgedec.head_state import ChainRules, DraftedChain, HeadState
from edgedec.load_options import LoadOptions
from edgedec.logit_ops import NUMPY_ROW_OPS
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward, ForwardItem, Model, Session
from edgedec.sessions.outer_session import OuterModel, OuterSession
from edgedec_export.head_to_gguf import write_head_gguf
from edgedec_models.draft_heads import remember_head
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.tokenizer import metadata
from edgedec_runtimes.trained_heads import gguf_eagle3
from edgedec_runtimes.trained_heads.card import Target
from edgedec_runtimes.trained_heads.kind import NAME, TRAINED
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text
from edgedec_runtimes.trained_heads.target import target_of

TINY = TinyHead(n_embd=64, n_embd_target=64, head_dim=16, taps=(0, 2, 4), n_vocab_target=260)
FOLDER = Path()
ECHO = "echo head"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a tiny model in a folder of its own."""
    (tmp_path / "models").mkdir()
    return tiny_llama(tmp_path / "models" / "m.gguf", n_layer=4)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the root of a cache without heads."""
    return tmp_path / "cache"


def heads(cache_dir: Path | None) -> list[Path]:
    """What another package's entry point names."""
    return list(FOLDER.iterdir())


def _refuse(head: Path, model: Path) -> None:
    if model.read_bytes() != tiny_llama(head.with_name("fits.gguf"), n_layer=4).read_bytes():
        raise UnsupportedModelError(f"the echo {head.name} does not fit {model.name}")


STRANGER = HeadKind(
    is_head=lambda path: path.is_file() and path.read_bytes() == ECHO.encode(),
    beside=lambda model: [path for path in [model.with_suffix(".echo")] if path.exists()],
    trained_for=lambda head: "any model",
    kinship=lambda head, model, cache_dir: Kinship.THIS_MODEL if head.suffix == ".echo" else Kinship.UNKNOWN,
    require_fit=_refuse,
    describe=lambda head: HeadDescription({"kind": ECHO}, [("kind", ECHO)]),
)
"""What another package's entry point names as a kind."""


class EchoState:
    """A head that drafts the same token again and again, and is always there: what a greedy text asks of HeadState."""

    reach, notes, gone, read_s, n_bytes, held_bytes = (0.5, 0.25), ("it echoes",), False, 0.0, 0, 0
    ops, summary, shared, evaluated = NUMPY_ROW_OPS, "the echo head", SharedForward(), ((2, 0.5),)
    price = DraftPrice(0.5)

    def __init__(self, n_vocab: int) -> None:
        self.token_ids = np.arange(n_vocab, dtype=np.int32)
        self.n_follows = 0

    def follow(self) -> None:
        """Count."""
        self.n_follows += 1

    def judge(self, n_drafts: int, n_right: int) -> None:
        """Find nothing wrong."""

    def seen_by(self, **around: object) -> "EchoState":
        """Return the same head: it has no place in the text."""
        return self

    def chain(self, n_past: int, token: int, rules: ChainRules) -> DraftedChain:
        """Draft the last token again, as often as there is room."""
        n = rules.n_max
        return DraftedChain((token,) * n, (0.9,) * n, (-1,) * n, (0.0,) * n, (0.9,) * n)


class EchoSession(OuterSession):
    """A session with such a head."""

    def __init__(self, inner: Session, model: Model | None = None) -> None:
        super().__init__(inner, model)
        self._state = EchoState(inner.model.card.n_vocab)

    @property
    def draft_head(self) -> HeadState:
        """The head."""
        return cast(HeadState, self._state)


class EchoModel(OuterModel):
    """A model whose sessions have such a head."""

    def session(self, n_ctx: int) -> Session:
        """Open a session."""
        return EchoSession(self.inner.session(n_ctx), self)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Let the model inside evaluate items of its own sessions."""
        return self.inner.forward(items)


class Echoing(Reference):
    """A runtime of another package, which runs heads of that package's kind."""

    name = "echoing"

    def draft_head_kinds(self, path: Path) -> tuple[str, ...]:
        """Return the kind."""
        return ("echo",)

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load a model; its head is where the options say it is."""
        assert options.draft_head is not None
        assert kind_of(options.draft_head) is STRANGER
        model = super().load(path, replace(options, draft_head=None))
        return EchoModel(model, model.card, model.capabilities)

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the model's terms and the head's."""
        return (*super().plan(path, replace(options, draft_head=None)), MemoryTerm("draft head", 10, "an echo"))


def _head(folder: Path, target: Target | None) -> Path:
    write_head(folder, TINY)
    (folder / RECORD_FILE).write_text(record_text(folder.name, target, None))
    return folder


def test_nothing_is_found_where_nothing_is(model: Path, cache: Path) -> None:
    """Neither the folder of the model nor the cache needs to hold anything."""
    assert find_head(model, [NAME], cache) is None


def test_a_head_beside_its_model_is_taken_by_its_name(model: Path, cache: Path) -> None:
    """A GGUF wins over a folder, and both over what the cache has."""
    _head(cache / "heads" / "trained", target_of(read_gguf(model)))
    folder = _head(model.with_name("m.head"), None)
    assert find_head(model, [NAME], cache) == folder
    file = write_head_gguf(load_head(folder), read_gguf(model), model.with_name("m.head.gguf"))
    assert find_head(model, [NAME], cache) == file


@pytest.mark.slow
def test_a_start_reads_each_thing_once(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding, planning, loading and writing share headers, vocabulary and head, and keep no header afterwards."""
    folder = _head(model.parent / "trained", target_of(read_gguf(model)))
    write_head_gguf(load_head(folder), read_gguf(model), model.with_name("m.head.gguf"))
    for _ in range(2):  # the first start makes tiles
        read = list[str]()
        with monkeypatch.context() as patched:
            for module, name, what in (
                (gguf_file, "read_header", lambda file, size, path: Path(path).name),
                (metadata, "_read_tokens", lambda gguf: "vocabulary"),
                (gguf_eagle3, "checked_head", lambda *args: "head"),
            ):
                patched.setattr(module, name, partial(_noted, read, getattr(module, name), what))
            with edgedec.load(model, cache_dir=cache) as engine:
                assert "head" in engine.generate("a", max_tokens=4).stats.drafters
                assert sorted(read) == ["head", "m.gguf", "m.head.gguf", "vocabulary"]
                gc.collect()
                assert not [path for path in gguf_file._in_use if path.parent == model.parent]


def _noted(read: list[str], function: Callable[..., Any], what: Callable[..., str], *args: Any, **more: Any) -> Any:
    read.append(what(*args))
    return function(*args, **more)


@pytest.mark.slow
def test_a_trained_head_is_taken_by_its_hashes(model: Path, cache: Path, tmp_path: Path) -> None:
    """One that learned from these weights wins over one of another quantization; one of another model is no match."""
    other = target_of(read_gguf(tiny_llama(tmp_path / "f16.gguf", n_layer=4, dtype="f16")))
    stranger = target_of(read_gguf(tiny_llama(tmp_path / "s.gguf", n_layer=4, seed=1)))
    _head(cache / "heads" / "1 stranger", stranger)
    _head(cache / "heads" / "2 unnamed", None)
    assert find_head(model, [NAME], cache) is None
    quantized = _head(cache / "heads" / "3 quantized", other)
    assert find_head(model, [NAME], cache) == quantized
    exact = _head(cache / "heads" / "4 exact", target_of(read_gguf(model)))
    assert find_head(model, [NAME], cache) == exact
    assert find_head(tiny_llama(tmp_path / "copy.gguf", n_layer=4), [NAME], cache) == exact


def test_a_head_is_found_where_it_was_noted(model: Path, cache: Path, tmp_path: Path) -> None:
    """Noting it twice is one note; a note of a head that is gone, or that holds no path, is passed over."""
    trained = _head(tmp_path / "elsewhere" / "my head", target_of(read_gguf(model)))
    remember_head(trained, cache)
    remember_head(trained, cache)
    assert len(list((cache / "heads").iterdir())) == 1
    assert find_head(model, [NAME], cache) == trained
    (cache / "heads" / "0.path").write_bytes(b"\0")
    (cache / "heads" / "1.path").mkdir()
    assert find_head(model, [NAME], cache) == trained
    trained.rename(tmp_path / "moved")
    assert find_head(model, [NAME], cache) is None


def test_a_shipped_head_is_found(model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in "shipped" names it; a GGUF names its target, too."""
    source = load_head(_head(tmp_path / "source", target_of(read_gguf(model))))
    (tmp_path / "shipped").mkdir()
    file = write_head_gguf(source, read_gguf(model), tmp_path / "shipped" / "m.gguf")
    monkeypatch.setattr("edgedec_models.draft_heads.shipped_heads", lambda cache_dir: [file])
    assert find_head(model, [NAME], cache) == file


def test_a_head_in_a_folder_of_another_package_is_found(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package names a function that returns its heads."""
    head = _head(tmp_path / "strangers" / "own", target_of(read_gguf(model)))
    monkeypatch.setattr(sys.modules[__name__], "FOLDER", head.parent)
    assert find_head(model, [NAME], cache) is None
    with_plugin(monkeypatch, tmp_path, plugins.HEAD_FOLDERS, "strangers", f"{__name__}:heads")
    assert find_head(model, [NAME], cache) == head


def test_a_broken_plug_in_is_passed_over(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that fails, or returns nothing, keeps no model from loading."""
    monkeypatch.setattr("edgedec_models.draft_heads.shipped_heads", lambda cache_dir: 1 / 0)
    assert find_head(model, [NAME], cache) is None
    monkeypatch.setattr("edgedec_models.draft_heads.shipped_heads", lambda cache_dir: None)
    assert find_head(model, [NAME], cache) is None


def test_what_is_no_head_is_passed_over(model: Path, cache: Path) -> None:
    """Damaged files, models and other folders beside the heads are none of the user's concern here."""
    folder = cache / "heads"
    folder.mkdir(parents=True)
    (folder / "a.gguf").write_bytes(b"GGUF\x03")
    (folder / "b.gguf").write_bytes(model.read_bytes())
    (folder / "c.txt").write_text("c")
    (folder / "d").mkdir()
    (folder / "e").mkdir()
    (folder / "e" / RECORD_FILE).write_text("{")
    assert [TRAINED.trained_for(path) for path in sorted(folder.iterdir())] == [None] * 5
    assert find_head(model, [NAME], cache) is None


@pytest.fixture
def _echoes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a kind of heads, one whose kind does not import, and one that names something else."""
    with_plugin(monkeypatch, tmp_path, plugins.HEAD_KINDS, "echo", f"{__name__}:STRANGER")
    with_plugin(monkeypatch, tmp_path, plugins.HEAD_KINDS, "gone", "no_such_module:GONE")
    with_plugin(monkeypatch, tmp_path, plugins.HEAD_KINDS, "other", f"{__name__}:ECHO")


@pytest.mark.usefixtures("_echoes")
def test_a_kind_of_another_package_is_found(model: Path, cache: Path, tmp_path: Path) -> None:
    """Only where a runtime takes its heads; beside the model, then elsewhere; one that does not fit is noted."""
    elsewhere = tmp_path / "elsewhere.echo"
    elsewhere.write_text(ECHO)
    remember_head(elsewhere, cache)
    assert kind_of(elsewhere) is STRANGER
    assert find_head(model, [NAME], cache) is None
    assert find_head(model, ["echo"], cache) == elsewhere
    (head := model.with_name("m.echo")).write_text(ECHO)
    for kinds in (["echo"], [NAME, "echo"]):
        assert usable_head(model, kinds, cache) == (head, "")
    trained = _head(cache / "heads" / "trained", target_of(read_gguf(model)))
    head.unlink()
    assert find_head(model, [NAME, "echo"], cache) == trained  # it learned from these weights
    other = tiny_llama(model.with_name("o.gguf"), n_layer=4, seed=1)
    assert usable_head(other, ["echo"], cache) == (
        None,
        "the draft head elsewhere.echo was found, but is not used: the echo elsewhere.echo does not fit o.gguf",
    )


@pytest.mark.slow
def test_a_nextn_layer_in_the_models_file_is_the_last_one_that_is_found(tmp_path: Path, cache: Path) -> None:
    """A head that was trained for these weights goes first; `edgedec info` says where the head is."""
    tiny = Tiny("qwen3", n_layer=4, n_embd=64, n_head=4, n_head_kv=2, head_dim=16, n_ff=32)
    model, alone = write_nextn(tmp_path / "m.gguf", tiny), write_nextn(tmp_path / "n.gguf", tiny, alone=True)
    assert find_head(model, [NAME], cache) == model
    assert find_head(model, ["other"], cache) is None
    assert usable_head(model, [NAME], cache) == (model, "")
    assert kind_of(model) is None
    assert kind_of(alone) is TRAINED
    told = re.sub(" +", " ", run_here("info", str(model)).text)
    assert "draft head a nextn layer in the model's file" in told
    assert "architecture qwen3, 4 layers" in told
    told = run_here("info", str(alone)).text
    assert "a trained draft head (nextn)" in told
    assert "what leaves layer 4 of 4, after the model's last norm" in told
    assert find_head(tiny_llama(tmp_path / "l.gguf", n_layer=4), [NAME], cache) is None
    trained = _head(cache / "heads" / "trained", target_of(read_gguf(model)))
    assert find_head(model, [NAME], cache) == trained


@pytest.mark.usefixtures("_echoes")
def test_a_head_of_another_package_is_described_and_checked(model: Path) -> None:
    """Its kind says what `edgedec info` shows, and what is wrong with it; of what is no head, edgedec's kind does."""
    (head := model.with_name("m.echo")).write_text(ECHO)
    assert ECHO in run_here("info", str(head)).text
    with pytest.raises(UnsupportedModelError, match=r"the echo m\.echo does not fit o\.gguf"):
        require_fit(head, tiny_llama(model.with_name("o.gguf"), n_layer=4, seed=1))
    with pytest.raises(UnsupportedModelError, match="this is no trained draft head"):
        require_fit(model, model)


@pytest.mark.usefixtures("_echoes")
def test_a_kind_that_fails_is_passed_over(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that raises keeps no model from loading."""

    def fail(*args: object) -> Sequence[Path]:
        raise ZeroDivisionError

    broken = HeadKind(*(fail,) * 6)  # type: ignore[arg-type]
    monkeypatch.setattr(sys.modules[__name__], "STRANGER", broken)
    head = _head(cache / "heads" / "own", target_of(read_gguf(model)))
    assert find_head(model, ["echo", NAME], cache) == head
    assert kind_of(model) is None


@pytest.mark.usefixtures("_echoes")
def test_a_kind_and_a_runtime_of_another_package_draft(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head that lies beside the model is found, planned, loaded and asked; it changes no text."""
    with_plugin(monkeypatch, tmp_path, plugins.RUNTIMES, "echoing", f"{__name__}:Echoing")
    model.with_name("m.echo").write_text(ECHO)
    keywords: dict[str, Any] = {"n_ctx": 64, "cache_dir": tmp_path, "n_draft_max": 3}
    with edgedec.load(model, runtime="reference", draft="off", n_ctx=64) as plain:
        expected = plain.generate("a b", max_tokens=8, temperature=0, ignore_end=True)
    with edgedec.load(model, runtime="echoing", draft="head", memory=2**31, **keywords) as engine:
        assert [term.detail for term in engine.plan.terms if term.name == "draft head"] == ["an echo"]
        made = engine.generate("a b", max_tokens=8, temperature=0, ignore_end=True)
        assert made.token_ids == expected.token_ids
        assert made.stats.drafters["head"]["nodes"] > 0
        assert "it echoes" in made.stats.explanation
        state = engine.pool.slots[0].session.draft_head
        assert isinstance(state, EchoState)
        assert state.n_follows == 1
