"""The suffix drafter's store in a file: what it carries over, what it refuses, and damage that does no harm."""

import hashlib
import os
import stat
from array import array
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoding.simulation import a_text
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here
from support.processes.rights import as_anybody

import edgedec
from edgedec.api.engine import save_draft_store
from edgedec.api.options import DraftOptions
from edgedec.drafter import Store
from edgedec.drafters.suffix.matching import Match
from edgedec.drafters.suffix.store_file import (
    DraftStore,
    newest,
    parse,
    require_draft_store,
    serialize,
    vocabulary_hash,
)
from edgedec.drafters.suffix.suffix import MOST_TOKENS, SuffixStore, Text
from edgedec.errors import CancelledError, EdgedecError, ModelFormatError, StorageError
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.progress import CancelToken

N_VOCAB = 1000
OURS, OTHER = b"v" * 32, b"w" * 32
HERE = Path("store")
posix = pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")


def a_model(n_vocab: int = N_VOCAB, first: bytes = b"a") -> Model:
    """Return what a store looks at of a model."""
    tokenizer = SimpleNamespace(n_vocab=n_vocab, piece=lambda i: first if i == 0 else b"%d" % i)
    return cast(Model, SimpleNamespace(tokenizer=tokenizer, card=SimpleNamespace(n_vocab=n_vocab)))


def text(*token_ids: int) -> Text:
    """Return token ids as a store keeps them."""
    return array("i", token_ids)


def lists(texts: Sequence[Text] | None) -> list[list[int]] | None:
    """Return texts as lists."""
    return None if texts is None else [one.tolist() for one in texts]


def said(*outputs: Sequence[int], store: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a store whose drafter saw these outputs."""
    store = {} if store is None else store
    learned = store.setdefault("suffix", SuffixStore())
    learned.outputs += [text(*output) for output in outputs]
    return store


def filled(path: Path, budget: int | None = None, model: Model | None = None) -> tuple[SuffixStore, str | None]:
    """Return what a new process takes from a file, and what it says of it."""
    store = Store(budget)
    note = DraftStore(path, model or a_model()).fill(store, LoadOptions())
    return store["suffix"], note


def held(path: Path) -> list[list[int]] | None:
    """Return the texts of a file."""
    return lists(parse(path.read_bytes(), vocabulary_hash(a_model().tokenizer), N_VOCAB, path))


texts = st.lists(st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=9), max_size=9)


@pytest.mark.slow
@given(texts)
def test_a_file_holds_what_was_written(written: list[list[int]]) -> None:
    """Every text, in order; an empty file holds none."""
    data = serialize([text(*one) for one in written], OURS)
    assert lists(parse(data, OURS, N_VOCAB, HERE)) == written
    assert parse(b"", OURS, N_VOCAB, HERE) == []


@pytest.mark.slow
@given(texts, st.data())
def test_damage_is_noticed(written: list[list[int]], data: st.DataObject) -> None:
    """A byte changed, or a file cut short or made longer: damaged or refused, never taken, never a crash."""
    whole = serialize([text(*one) for one in written], OURS)
    place = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["change", "cut", "more"]))
    damaged = {
        "change": whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :],
        "cut": whole[:place] or b"e",
        "more": whole + bytes(place + 1),
    }[kind]
    try:
        assert parse(damaged, OURS, N_VOCAB, HERE) is None
    except (StorageError, ModelFormatError):
        assert place <= len(b"edgedec draft store 1\n")


@pytest.mark.slow
@given(st.lists(st.one_of(st.integers(0, 12), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1])), max_size=12))
def test_a_forged_body_gives_texts_or_none(numbers: list[int]) -> None:
    """Whatever counts and tokens stand behind a right hash, what comes out are tokens of the vocabulary."""
    body = OURS + b"".join(number.to_bytes(4, "little") for number in numbers)
    forged = serialize([], OURS)[:22] + hashlib.sha256(body).digest() + body
    found = parse(forged, OURS, 10, HERE)
    if found is not None:
        assert [len(found), *map(len, found)] == numbers[: len(found) + 1]
        assert [token for one in found for token in one] == numbers[len(found) + 1 :]
        assert all(0 <= token < 10 for one in found for token in one)


@given(st.binary(max_size=200).filter(lambda noise: not noise.startswith(b"edgedec draft store ")))
def test_noise_is_no_draft_store(noise: bytes) -> None:
    """Bytes of anybody else's are refused; behind our hash they are damaged."""
    if noise:
        with pytest.raises(StorageError, match="is no draft store; name another file"):
            parse(noise, OURS, N_VOCAB, HERE)
    body = OURS + noise
    forged = serialize([], OURS)[:22] + hashlib.sha256(body).digest() + body
    assert noise == bytes(4) or parse(forged, OURS, 1, HERE) in (None, [])


def test_files_of_others_are_refused() -> None:
    """Another vocabulary and another release are told apart from damage."""
    data = serialize([text(1, 2)], OTHER)
    with pytest.raises(ModelFormatError, match="made with a model of another vocabulary; name another file"):
        parse(data, OURS, N_VOCAB, HERE)
    with pytest.raises(ModelFormatError, match="of another edgedec release"):
        parse(data.replace(b"store 1", b"store 2"), OURS, N_VOCAB, HERE)


def test_a_vocabulary_is_known_by_its_size_and_its_tokens() -> None:
    """Models of the same tokenizer share a store, others don't."""
    hashes = {vocabulary_hash(model.tokenizer) for model in (a_model(), a_model(999), a_model(first=b"b"), a_model())}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("n_tokens", "kept"),
    [(9, [[1, 2], [3], [4, 5]]), (4, [[3], [4, 5]]), (3, [[3], [4, 5]]), (2, [[4, 5]]), (1, [[5]]), (0, [])],
)
def test_the_newest_texts_stay(n_tokens: int, kept: list[list[int]]) -> None:
    """As many as have room, whole; the last one alone may lose its beginning."""
    assert lists(newest([text(1, 2), text(3), text(4, 5)], n_tokens)) == kept


def test_what_one_process_saw_the_next_one_proposes(tmp_path: Path) -> None:
    """Its contexts are those of the texts; saving again without anything new leaves the file alone."""
    path = tmp_path / "store"
    learned, note = filled(path)
    assert (len(learned.young.next), note) == (1, None)
    assert not path.exists()
    file, store = DraftStore(path, a_model()), said([5, 6, 7], [8])
    file.save(store)
    path.chmod(0o644)
    file.save(store)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert held(path) == [[5, 6, 7], [8]]
    learned, note = filled(path)
    match = Match(learned.young)
    match.follow(5)
    match.follow(6)
    assert match.length == 2
    assert (learned.take_outputs(), note) == ([], None)


@posix
def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    """Mode 0600, whatever the file had; nothing else is left in the folder; a link stays one."""
    path, link = tmp_path / "store", tmp_path / "link"
    path.touch(0o666)
    link.symlink_to(path)
    DraftStore(require_draft_store(link), a_model()).save(said([1]))
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {one.name for one in tmp_path.iterdir()} == {"store", "link"}


def test_two_processes_add_to_one_file(tmp_path: Path) -> None:
    """What each saw stays, a text that both saw once, the latest at the end."""
    path = tmp_path / "store"
    one, other = DraftStore(path, a_model()), DraftStore(path, a_model())
    one.save(said([1, 2], [3]))
    other.save(said([4], [1, 2]))
    one.save(said([5]))
    assert held(path) == [[3], [4], [1, 2], [5]]


def test_what_is_forgotten_leaves_the_file(tmp_path: Path) -> None:
    """With the next save, even where nothing was said since; what comes after is kept."""
    path = tmp_path / "store"
    file = DraftStore(path, a_model())
    file.save(said([1, 2]))
    file.forget()
    file.save({})
    assert held(path) == []
    file.save(said([3]))
    file.forget()
    file.save(said([4]))
    assert held(path) == [[4]]


@pytest.mark.slow
def test_the_file_keeps_to_its_bound(tmp_path: Path) -> None:
    """The oldest texts go; a budget of the reader's is kept, too, and does not make the file smaller."""
    path = tmp_path / "store"
    outputs = [a_text(2000, seed) for seed in range(50)]
    DraftStore(path, a_model()).save(said(*outputs))
    assert held(path) == outputs[-(MOST_TOKENS // 2000) :]
    learned, _ = filled(path)
    assert 16_000_000 < learned.memory_bytes() <= 32_000_000 + 2 * 2 * 2000 * 420
    learned, _ = filled(path, 2_000_000)
    assert learned.memory_bytes() <= 2_000_000
    DraftStore(path, a_model()).save(said([1], store={"suffix": learned}))
    assert len(held(path) or []) == MOST_TOKENS // 2000 + (MOST_TOKENS % 2000 > 0)


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    """Nothing depends on it, so it is told and replaced."""
    path = tmp_path / "store"
    DraftStore(path, a_model()).save(said([1, 2]))
    path.write_bytes(path.read_bytes()[:-1])
    learned, note = filled(path)
    assert len(learned.young.next) == 1
    assert note == f"the draft store {path} is damaged; it is begun anew"
    DraftStore(path, a_model()).save(said([3]))
    assert held(path) == [[3]]


def test_loading_a_store_can_be_cancelled(tmp_path: Path) -> None:
    """As all of loading can."""
    path, cancel = tmp_path / "store", CancelToken()
    DraftStore(path, a_model()).save(said([1, 2]))
    cancel.cancel()
    with pytest.raises(CancelledError):
        DraftStore(path, a_model()).fill(Store(), LoadOptions(cancel=cancel))


def test_places_that_cannot_be_written_are_refused_before_loading(tmp_path: Path) -> None:
    """A folder, no folder, somebody else's file, a name that none can have; what stands there stays."""
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for path, words in {
        tmp_path: "is no regular file",
        tmp_path / "no" / "store": "there is no directory",
        notes: "exists and is no draft store",
        Path("a\0b"): "can't be written there",
    }.items():
        with pytest.raises(StorageError, match=words):
            edgedec.load("no such model", drafting=DraftOptions(store=path), offline=True)
    assert notes.read_text() == "mine"


@posix
def test_a_folder_without_permission_is_refused_before_loading() -> None:
    """With the reason."""
    with TemporaryDirectory() as name:  # pytest's own are closed to others
        Path(name).chmod(0o555)
        with as_anybody(), pytest.raises(StorageError, match=r"can't be written there \(.*Permission denied"):
            require_draft_store(Path(name) / "store")


def test_a_failure_to_write_is_told_once_and_leaves_nothing(tmp_path: Path) -> None:
    """Where the folder is gone when it comes to writing."""
    folder = tmp_path / "folder"
    folder.mkdir()
    file, store = DraftStore(folder / "store", a_model()), said([1])
    folder.rmdir()
    with pytest.raises(StorageError, match="could not be written"):
        file.save(store)
    file.save(store)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return tiny_llama(tmp_path_factory.mktemp("store") / "tiny.gguf", n_ctx_train=512)


def generated(model: Path, store: Path | None, prompt: str = "Once") -> edgedec.Generation:
    """Generate with a pinned suffix drafter."""
    with edgedec.load(model, runtime="reference", draft="suffix", drafting=DraftOptions(store=store)) as engine:
        return engine.generate(prompt, max_tokens=40, temperature=0, ignore_end=True)


@pytest.mark.slow
def test_the_text_is_the_same_with_a_store_and_without(model: Path, tmp_path: Path) -> None:
    """The second start knows the first one's text and takes fewer steps; a damaged store is told once."""
    path = tmp_path / "store"
    plain, first, second = generated(model, None), generated(model, path), generated(model, path)
    assert plain.token_ids == first.token_ids == second.token_ids
    assert plain.stats.n_steps == first.stats.n_steps > second.stats.n_steps
    path.write_bytes(path.read_bytes()[:-3])
    with edgedec.load(model, runtime="reference", draft="suffix", drafting=DraftOptions(store=path)) as engine:
        reasons = [engine.generate("Once", max_tokens=2, temperature=0).stats.reasons for _ in range(2)]
    assert reasons == [[f"the draft store {path} is damaged; it is begun anew"], []]


@pytest.mark.slow
def test_an_engine_writes_when_asked_and_when_it_closes(model: Path, tmp_path: Path) -> None:
    """And a relative path means the folder that it was opened in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        engine = edgedec.load(model, runtime="reference", drafting=DraftOptions(store="store"))
        patch.chdir("/")
        engine.generate("Once", max_tokens=5, ignore_end=True, temperature=0)
        save_draft_store(engine)
        size = (tmp_path / "store").stat().st_size
        engine.generate("Twice", max_tokens=5, ignore_end=True, temperature=0)
        engine.close()
        assert (tmp_path / "store").stat().st_size > size
        engine.close()


@pytest.mark.slow
def test_closing_frees_everything_before_it_says_that_nothing_was_written(model: Path, tmp_path: Path) -> None:
    """The error is the second thing."""
    folder = tmp_path / "folder"
    folder.mkdir()
    engine = edgedec.load(model, runtime="reference", drafting=DraftOptions(store=folder / "store"))
    engine.generate("Once", max_tokens=5, ignore_end=True)
    folder.rmdir()
    with pytest.raises(StorageError, match="could not be written"):
        engine.close()
    with pytest.raises(EdgedecError):
        engine.generate("Once")
    engine.close()


@pytest.mark.slow
def test_another_models_store_is_refused(model: Path, tmp_path: Path) -> None:
    """It stays as it is."""
    path = tmp_path / "store"
    generated(model, path)
    before = path.read_bytes()
    other = tiny_llama(tmp_path / "other.gguf", n_vocab=270)
    with pytest.raises(ModelFormatError, match="of another vocabulary"):
        edgedec.load(other, runtime="reference", drafting=DraftOptions(store=path))
    assert path.read_bytes() == before


@pytest.mark.slow
def test_the_command_takes_it_and_a_benchmark_does_not(model: Path, tmp_path: Path) -> None:
    """run writes the file, and says what failed after the text; bench refuses the option."""
    path, args = tmp_path / "store", ("--runtime", "reference", "--raw", "-t", "0", "-n", "8", "-q")
    result = run_here("run", model, "Once", *args, "--draft-option", f"store={path}")
    assert (result.code, result.err) == (0, "")
    assert path.is_file()
    assert run_here("run", model, "Once", *args, "--draft-option", f"store={path}").text == result.text
    run_here("bench", model, "--draft-option", f"store={path}").failed(40, "leave --draft-option store out")
    run_here("run", model, "Once", "--draft-option", f"store={tmp_path}").failed(60, "is no regular file")
