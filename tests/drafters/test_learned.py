"""Drafters that know texts beforehand: the small text that ships, and what a user had learned."""

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

import edgedec
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext
from edgedec.drafters.suffix.common import CommonDrafter, CommonText, common_text
from edgedec.drafters.suffix.learned import LearnedDrafter, SortedMatch
from edgedec.drafters.suffix.learned_file import Learned, LearnedSource, read_learned
from edgedec.drafters.suffix.matching import MatchRates
from edgedec.errors import CancelledError, CapabilityError, RequestError, StorageError
from edgedec.load_options import LoadOptions
from edgedec.progress import CancelToken, Progress
from edgedec.scheduler.draft_tree import DraftTree
from edgedec_apps.learning import files_of, learn_files, sort_text, with_sources, without_below, write_learned

MakeContext = Callable[..., DraftContext]
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=3)


def joined(texts: Sequence[Sequence[int]]) -> list[int]:
    """Return texts as one, each ended by -1."""
    return [token for text in texts for token in (*text, -1)]


def source(path: str, *tokens: int) -> LearnedSource:
    """Return a file that was learned."""
    return LearnedSource(path, np.array(tokens, np.int32))


@pytest.mark.slow
@given(TEXTS)
def test_places_are_sorted_by_what_follows(texts: list[list[int]]) -> None:
    """The order is that of Python's sort of all suffixes, where they differ within 64 tokens."""
    tokens = joined(texts)
    order = sort_text(np.array(tokens, np.int32)).order.tolist()
    assert sorted(order) == list(range(len(tokens)))
    suffixes = [tokens[place : place + 64] for place in order]
    assert suffixes == sorted(suffixes)


@pytest.mark.slow
@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, 4), min_size=1, max_size=50))
def test_the_longest_context_is_found(texts: list[list[int]], said: list[int]) -> None:
    """After each token, the context is the longest of at most 16 tokens that the text holds, or a longer one of it."""
    tokens = joined(texts)
    match = SortedMatch(sort_text(np.array(tokens, np.int32)))
    for n in range(1, len(said) + 1):
        match.follow(said[n - 1])
        held = [k for k in range(1, n + 1) if places_of(tokens, said[n - k : n])]
        assert match.length in held or (match.length == 0 and not held)
        assert match.length >= min(16, max(held, default=0))
        followers = Counter(
            tokens[place + match.length] for place in places_of(tokens, said[n - match.length : n]) if match.length
        )
        ranked = [token for token, _ in sorted(followers.items(), key=lambda item: (-item[1], item[0])) if token >= 0]
        assert match.best() == (ranked[0] if ranked else None)
        draft = match.draft(MatchRates(), 8)
        assert bool(len(draft)) <= bool(ranked)
        assert all(token > -1 for token in draft.tokens)


def places_of(tokens: Sequence[int], context: Sequence[int]) -> list[int]:
    """Return where a context stands in a text."""
    return [i for i in range(len(tokens)) if context and list(tokens[i : i + len(context)]) == list(context)]


def test_long_contexts_stay_within_what_is_sorted() -> None:
    """A text of equal tokens matches at any length, and the draft behind it is of that token."""
    match = SortedMatch(sort_text(np.array([7] * 300 + [-1], np.int32)))
    for n in range(200):
        match.follow(7)
        assert min(16, n + 1) <= match.length < 32
    draft = match.draft(MatchRates(), 40)
    assert set(draft.tokens) == {7}
    assert len(draft) <= 24


def test_it_proposes_what_mostly_followed(make_context: MakeContext) -> None:
    """The most frequent continuation stands first, no file runs on into the next, and nothing is learned from texts."""
    text = sort_text(np.array([1, 2, 3, 9, -1, 1, 2, 3, 9, -1, 1, 2, 4, 8, -1], np.int32))
    drafter = LearnedDrafter(make_context(), text)
    drafter.begin([7, 1, 2])
    draft = drafter.propose(4, 1e18)
    assert list(draft.tokens) == [3, 4, 9, 8]
    assert list(draft.parents) == [-1, -1, 0, 1]
    drafter.learn(Verification((), (3, 9)), {})
    assert len(drafter.propose(4, 1e18)) == 0
    with pytest.raises(CapabilityError, match="edgedec learn"):
        LearnedDrafter(make_context())


def test_a_branch_that_the_model_rules_out_is_dropped() -> None:
    """Where the model is sure of its first tokens, no node behind another one is verified; else all stay."""
    for chances, kept in (((0.9, 0.095), 2), ((0.6, 0.2), 4)):
        tree = DraftTree()
        tree.add([5, 6, 7, 8], [-1, 0, -1, 2], [0.5, 0.9, 0.9, 0.9])
        draft = Draft.tree([5, 9], [-1, -1], chances)
        tree.drop_improbable(draft, chances)
        assert sum(path > 0 for path in tree.paths()) == kept
    tree.add([5], [-1], [0.1])
    tree.drop_improbable(Draft.chain([]), ())
    assert min(tree.paths()) > 0


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    """Sources and order return, for the owner's eyes only; an empty one is no file; cancelling leaves the old one."""
    path = tmp_path / "learned" / "v.learned"
    known = with_sources(Learned(path, (), ()), "m", [source("/a/x", 3, 4, 5), source("/a/y", 3, 4), source("/b/z")])
    write_learned(known)
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_learned(path, 10)
    assert found is not None
    assert [(one.path, one.tokens.tolist()) for one in found[0].sources] == [("/a/x", [3, 4, 5]), ("/a/y", [3, 4])]
    assert found[0].models == ("m",)
    assert found[1].tokens.tolist() == [3, 4, 5, -1, 3, 4, -1]
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(CancelledError):
        write_learned(with_sources(found[0], "m", [source("/a/x", 9)]), cancel)
    again = with_sources(found[0], "m", [source("/a/x", 9)])
    assert [one.path for one in again.sources] == ["/a/y", "/a/x"]
    assert [one.path for one in without_below(again, Path("/a/x")).sources] == ["/a/y"]
    write_learned(without_below(again, Path("/a")))
    assert read_learned(path) is None


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_damaged_file_is_refused(data: st.DataObject) -> None:
    """Whatever byte is changed or cut off, reading gives StorageError, never another exception or wrong tokens."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "v.learned"
        write_learned(Learned(path, ("m",), (source("/a", *range(9)), source("/b", 2, 3))))
        whole = path.read_bytes()
        place = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            damaged = whole[:place]
        else:
            damaged = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match="learn the files again"):
            read_learned(path, 10)


@pytest.mark.parametrize("n_vocab", [5, 9])
def test_tokens_beyond_the_vocabulary_are_refused(n_vocab: int, tmp_path: Path) -> None:
    """A file whose sum is right may still be of another vocabulary."""
    path = tmp_path / "v.learned"
    write_learned(Learned(path, (), (source("/a", 9),)))
    assert read_learned(path, 10) is not None
    with pytest.raises(StorageError):
        read_learned(path, n_vocab)


def test_texts_are_found_and_the_cap_holds(tmp_path: Path) -> None:
    """Hidden files, caches, links and files that are no text are left out; the oldest files go for new ones."""
    with edgedec.load(tiny_llama(tmp_path / "m.gguf"), runtime="reference", draft="off") as engine:
        folder = tmp_path / "code"
        (folder / "__pycache__").mkdir(parents=True)
        for name, content in (("a.py", b"abcd"), ("b.py", b"efgh"), ("c.bin", b"a\0b"), ("d", b"\xff"), (".e", b"e")):
            (folder / name).write_bytes(content)
        (folder / "__pycache__" / "f.py").write_bytes(b"f")
        if os.name == "posix":
            (folder / "link.py").symlink_to(folder / "a.py")
        assert [path.name for path in files_of([folder, folder / "a.py"])] == ["a.py", "b.py", "c.bin", "d"]
        report = learn_files(tmp_path, "m", engine.tokenizer, [folder])
        assert (report.n_files, report.n_unread, report.n_without_room, report.n_dropped) == (2, 2, 0, 0)
        (tmp_path / "new").write_text("ijkl", encoding="utf-8")
        n = len(engine.tokenizer.encode("ijkl", add_special=False)) + 1
        report = learn_files(tmp_path, "m", engine.tokenizer, [tmp_path / "new"], most_bytes=8 * n)
        assert (report.n_files, report.n_dropped, report.learned.n_bytes) == (1, 2, 8 * n)
        report = learn_files(tmp_path, "m", engine.tokenizer, [folder], most_bytes=8 * n)
        assert (report.n_files, report.n_without_room) == (1, 1)
        with pytest.raises(RequestError, match="none of the 1 files"):
            learn_files(tmp_path, "m", engine.tokenizer, [folder / "c.bin"])
        with pytest.raises(RequestError, match="no file or folder"):
            learn_files(tmp_path, "m", engine.tokenizer, [tmp_path / "none"])


@pytest.mark.slow
def test_the_command_learns_lists_and_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned drafts at the next load and changes no text; after --forget nothing is left."""
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path / "cache"))
    model, notes = tiny_llama(tmp_path / "m.gguf"), tmp_path / "notes.txt"
    with edgedec.load(model, runtime="reference", draft="off") as engine:
        plain = engine.generate("Once", max_tokens=30, temperature=0, ignore_end=True)
    notes.write_text("Once" + plain.text, encoding="utf-8")
    assert run_here("learn", "--list").text.strip() == "nothing was learned"
    assert run_here("learn", notes, "--for", model, "--quiet").code == 0
    listed = json.loads(run_here("learn", "--list", "--json").text)
    assert [file["path"] for file in listed["learned"][0]["files"]] == [os.fspath(notes)]
    assert os.fspath(notes) in run_here("learn", "--list").text
    for draft in ("learned", "auto"):
        with edgedec.load(model, runtime="reference", draft=draft) as engine:
            found = engine.generate("Once", max_tokens=30, temperature=0, ignore_end=True)
        assert found.token_ids == plain.token_ids
        assert found.stats.drafters["learned"]["nodes"] > 0
        assert draft == "auto" or found.stats.n_accepted_tokens > 0
    assert json.loads(run_here("learn", "--forget", tmp_path, "--json").text) == {"forgotten": 1}
    assert run_here("learn", "--list").text.strip() == "nothing was learned"
    with edgedec.load(model, runtime="reference", draft="learned") as engine:
        found = engine.generate("Once", max_tokens=3, temperature=0)
    assert any("edgedec learn" in reason for reason in found.stats.reasons)
    for arguments in (("learn",), ("learn", "--list", "--forget"), ("learn", "--for", "m"), ("learn", "x", "--list")):
        assert run_here(*arguments).code != 0


@pytest.mark.slow
def test_a_damaged_store_is_a_reason_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model loads and writes, the statistics name the file, and --forget deletes it."""
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path / "cache"))
    model = tiny_llama(tmp_path / "m.gguf")
    (tmp_path / "notes").write_text("abc", encoding="utf-8")
    assert run_here("learn", tmp_path / "notes", "--for", model, "--quiet").code == 0
    (file,) = (tmp_path / "cache" / "learned").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with edgedec.load(model, runtime="reference") as engine:
        found = engine.generate("Once", max_tokens=3, temperature=0)
    assert any("learned off" in reason and file.name in reason for reason in found.stats.reasons)
    assert "damaged" in run_here("learn", "--list").text
    assert run_here("learn", "--forget").code == 0
    assert not file.exists()


def test_of_the_small_text_it_proposes_what_mostly_followed(make_context: MakeContext) -> None:
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
