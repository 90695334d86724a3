"""Draft heads and picture encoders from a hub: fetched whole with or without a model, kept, listed, removed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.heads.loaded_blocks import FLOATS, of_floats
from support.heads.tiny_blocks import tiny_block, write_block
from support.heads.tiny_heads import TinyHead, head_config, head_weights, stored_tensors
from support.models.hf_checkpoints import safetensors_bytes
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny
from support.processes.command_line import run_here
from support.processes.servers import StubServer, add_repository, catalogue_entry, model_bytes

from edgedec.errors import ModelNotFoundError, OfflineError
from edgedec.gguf.file import read_gguf
from edgedec.head_kinds import find_head
from edgedec.load_options import ResolveOptions
from edgedec_models.cache import list_models, remove_model
from edgedec_models.hubs.hub_spec import choose_projector
from edgedec_models.resolve import pull, resolve
from edgedec_runtimes.trained_heads.kind import NAME as TRAINED
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.record import record_text
from edgedec_runtimes.trained_heads.target import target_of

TINY = TinyHead()
CONFIG = json.dumps(head_config(TINY)).encode()
WEIGHTS = safetensors_bytes(stored_tensors(TINY, head_weights(TINY)))
HEAD = {"README.md": b"# Head", "config.json": CONFIG, "model.safetensors": WEIGHTS, "optimizer.pt": b"x"}
WANTED, OFFLINE = ResolveOptions(draft_head=True), ResolveOptions(draft_head=True, offline=True)


@pytest.fixture
def hub(server: StubServer) -> StubServer:
    """Return a hub that has the head."""
    add_repository(server, "someone/head", HEAD)
    return server


def test_a_checkpoint_is_fetched_whole_and_kept(hub: StubServer, root: Path) -> None:
    """config.json is returned, the weights lie beside it, and nothing else is fetched, then or later."""
    path = resolve("hf:someone/head", WANTED)
    assert path is not None
    assert path == root / "models" / "hf" / "someone" / "head" / "main" / "config.json"
    assert load_head(path).card.n_embd == TINY.n_embd
    assert not (path.parent / "optimizer.pt").exists()
    n_seen = len(hub.seen)
    assert resolve("hf:someone/head", OFFLINE) == path
    assert len(hub.seen) == n_seen


def test_a_head_without_its_weights_is_fetched_again(hub: StubServer) -> None:
    """Offline that is an error, as it is for a model."""
    path = pull("hf:someone/head", WANTED)
    (path.parent / "model.safetensors").unlink()
    with pytest.raises(OfflineError, match="hf:someone/head"):
        resolve("hf:someone/head", OFFLINE)
    assert pull("hf:someone/head", WANTED) == path
    assert (path.parent / "model.safetensors").read_bytes() == WEIGHTS


def test_info_knows_a_head_of_a_hub_by_its_name(hub: StubServer) -> None:
    """Once it is in the cache; before, it says that it is not."""
    assert run_here("info", "hf:someone/head").code == 21
    pull("hf:someone/head", WANTED)
    told = run_here("info", "hf:someone/head")
    assert told.code == 0, told.err
    assert "a trained draft head" in told.text


def test_a_gguf_wins_over_a_checkpoint(server: StubServer) -> None:
    """It is one file, and quantized."""
    add_repository(server, "someone/head", HEAD | {"head-Q4_0.gguf": model_bytes(9_000)})
    assert pull("hf:someone/head", WANTED).name == "head-Q4_0.gguf"


def test_a_model_is_no_head(server: StubServer) -> None:
    """Its weights are not fetched; and a head is no model."""
    model = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS}
    add_repository(server, "someone/model", model)
    with pytest.raises(ModelNotFoundError, match="that of a model, not of a draft head"):
        pull("hf:someone/model", WANTED)
    assert not any("safetensors" in seen.path for seen in server.seen)
    add_repository(server, "someone/head", HEAD)
    with pytest.raises(ModelNotFoundError, match="no GGUF model"):
        resolve("hf:someone/head", ResolveOptions())


@pytest.mark.slow
def test_the_command_pulls_a_head_that_the_model_then_uses(server: StubServer, root: Path, tmp_path: Path) -> None:
    """Named on the command line it drafts; a head that names its model by hashes is found without being named."""
    model = write_tiny(tmp_path / "m.gguf", Tiny(n_layer=4, n_embd=48, n_head=3, n_head_kv=1, head_dim=16, n_ff=80))
    tiny = replace(TINY, n_vocab_target=N_VOCAB, n_embd=48, n_embd_target=48, head_dim=16, taps=(2, 3, 4))
    weights = safetensors_bytes(stored_tensors(tiny, head_weights(tiny)))
    head = {"config.json": json.dumps(head_config(tiny)).encode(), "model.safetensors": weights}
    record = record_text("named", target_of(read_gguf(model)), None).encode()
    add_repository(server, "someone/named", head | {"edgedec-head.json": record})
    add_repository(server, "someone/nameless", head)
    for name in ("named", "nameless"):
        pulled = run_here("pull", f"hf:someone/{name}", "--json", "-q")
        assert pulled.code == 0, pulled.err
        path = Path(json.loads(pulled.out)["path"])
        assert path == root / "models" / "hf" / "someone" / name / "main" / "config.json"
    n_seen = len(server.seen)
    assert find_head(model, [TRAINED], root) == root / "models" / "hf" / "someone" / "named" / "main"
    for options in (["--draft", "head", "--draft-option", "head=hf:someone/nameless"], ["--draft", "head"]):
        told = run_here("run", model, "aa bb aa bb", "-n", "12", "--temperature", "0", "--offline", "--json", *options)
        assert told.code == 0, told.err
        assert json.loads(told.out)["stats"]["drafters"]["head"]["nodes"] > 0
    assert len(server.seen) == n_seen
    remove_model("hf:someone/named")
    assert find_head(model, [TRAINED], root) is None
    assert list((root / "heads").iterdir()) == []


def test_a_head_of_the_catalogue_lies_beside_its_model(
    server: StubServer, root: Path, catalogue: Callable[[str], None]
) -> None:
    """Pulled under the name NAME.head, it is what a model NAME of the cache drafts with."""
    data = model_bytes(5_000, seed=3)
    server.add("/tiny.gguf", data)
    source = {"kind": "url", "url": f"{server.root}/tiny.gguf"}
    catalogue(catalogue_entry(data, source, name="tiny.head", architecture="eagle3"))
    path = pull("tiny.head", ResolveOptions())
    assert path == root / "models" / "tiny.head.gguf"
    assert find_head(root / "models" / "tiny.gguf", [TRAINED], root) == path


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["deepspec", "liquid", "speculators", "z-lab"])
def test_a_block_head_is_fetched_and_found(server: StubServer, root: Path, tmp_path: Path, dialect: Any) -> None:
    """In each dialect of published checkpoints; all that is read of it; and it is found for the model it names."""
    model = write_tiny(tmp_path / "m.gguf", FLOATS)
    write_block(tmp_path / "head", tiny_block(of_floats({"markov": "vanilla", "rank": 8})), dialect)
    files = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
    record = record_text("block", target_of(read_gguf(model)), None).encode()
    add_repository(server, "someone/block", files | {"README.md": b"# Head", "edgedec-head.json": record})
    path = pull("hf:someone/block", WANTED)
    assert {file.name for file in path.parent.iterdir()} >= {*files, "edgedec-head.json"}
    assert not (path.parent / "README.md").exists()
    card = load_head(path).card
    assert card.block is not None
    assert (card.block.size, card.block.rank, card.target) == (5, 8, target_of(read_gguf(model)))
    assert find_head(model, [TRAINED], root) == path.parent


def test_pickles_are_refused(server: StubServer, tmp_path: Path) -> None:
    """The message says why; nothing is fetched of a block head whose mask is one, as it drafts wrongly without."""
    write_block(tmp_path / "head", tiny_block(of_floats()))
    files = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
    add_repository(server, "someone/block", files | {"mask_embedding.pt": b"x"})
    add_repository(server, "someone/head", {"config.json": CONFIG, "pytorch_model.bin": b"\x80\x02"})
    for name, words in (("block", r"needs mask_embedding\.pt, a PyTorch file"), ("head", "can run code")):
        with pytest.raises(ModelNotFoundError, match=words):
            pull(f"hf:someone/{name}", WANTED)
    assert not any("block/resolve" in seen.path for seen in server.seen)


def test_a_head_is_listed_and_removed(hub: StubServer, root: Path) -> None:
    """It is one line of the list, with the size of its weights; all of its files go."""
    pull("hf:someone/head", WANTED)
    (found,) = list_models()
    assert (found.name, found.complete) == ("hf:someone/head:config.json", True)
    assert found.size_bytes == len(WEIGHTS)
    assert remove_model("hf:someone/head") >= found.size_bytes
    assert [path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


FILES = ("eye-Q8_0.gguf", "mmproj-eye-f16.gguf", "mmproj-eye-Q8_0.gguf", "mmproj-eye-f32.gguf")
REPO = {name: model_bytes(99 + i) for i, name in enumerate(FILES)}


@pytest.mark.parametrize(
    ("files", "model", "expected"),
    [
        (FILES, "eye-Q8_0.gguf", "mmproj-eye-Q8_0.gguf"),
        (["mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf"], "eye-Q4_K_M.gguf", "mmproj-F16.gguf"),
        (["mmproj-BF16.gguf", "mmproj-F32.gguf"], "eye-Q4_K_M.gguf", "mmproj-BF16.gguf"),
        (["mmproj-a-Q8_0.gguf", "mmproj-eye-f16.gguf"], "eye-Q4_K_M.gguf", "mmproj-eye-f16.gguf"),
        (["eye-Q4_K_M.gguf", "../mmproj.gguf"], "eye-Q4_K_M.gguf", None),
    ],
)
def test_the_models_own_encoder_of_8_bits_is_preferred(files: list[str], model: str, expected: str | None) -> None:
    """By the name first, then by the size."""
    assert choose_projector(files, model) == expected


def test_it_is_fetched_listed_with_no_model_and_removed_with_the_last_one(server: StubServer, root: Path) -> None:
    """`list` shows the model alone; `rm` of the model takes the encoder along."""
    add_repository(server, "someone/eye-GGUF", REPO)
    path = resolve("hf:someone/eye-GGUF", ResolveOptions())
    assert path is not None
    assert sorted(file.name for file in path.parent.glob("*.gguf")) == ["eye-Q8_0.gguf", "mmproj-eye-Q8_0.gguf"]
    assert [model.path for model in list_models()] == [path]
    freed = remove_model("hf:someone/eye-GGUF:eye-Q8_0.gguf")
    assert freed >= len(REPO["eye-Q8_0.gguf"]) + len(REPO["mmproj-eye-Q8_0.gguf"])
    assert not path.parent.exists()


HUB = "hf/o/r/main"


@pytest.mark.parametrize(
    ("files", "name", "gone"),
    [
        (["eye-Q8_0", "mmproj-eye-f16", "a", "mmproj-a-f16"], "eye-Q8_0", ["mmproj-eye-f16"]),
        (["eye-Q8_0", "eye-Q4_0", "mmproj-eye-f16"], "eye-Q8_0", []),
        (["eye-Q8_0", "mmproj-f16"], "eye-Q8_0", ["mmproj-f16"]),
        (["eye-Q8_0", "a", "mmproj-f16"], "eye-Q8_0", []),
        (["eye-Q8_0", "mmproj-a-f16"], "eye-Q8_0", []),
        (["eye-Q8_0", "mmproj-eye-f16", "mmproj-eye-Q8_0"], "mmproj-eye-f16", []),
        ([f"{HUB}/eye-Q8_0", f"{HUB}/mmproj-x-f16"], "hf:o/r:eye-Q8_0.gguf", [f"{HUB}/mmproj-x-f16"]),
        ([f"{HUB}/q8/eye-Q8_0", f"{HUB}/mmproj-x-f16"], "hf:o/r:q8/eye-Q8_0.gguf", [f"{HUB}/mmproj-x-f16"]),
        ([f"{HUB}/q8/eye-Q8_0", f"{HUB}/q4/eye-Q4_0", f"{HUB}/mmproj-f16"], "hf:o/r:q8/eye-Q8_0.gguf", []),
        ([f"{HUB}/a", f"{HUB}/mmproj-a-f16", f"{HUB}/b"], "hf:o/r:a.gguf", [f"{HUB}/mmproj-a-f16"]),
    ],
)
def test_an_encoder_goes_with_the_last_model_that_has_it(
    root: Path, files: list[str], name: str, gone: list[str]
) -> None:
    """In the cache's own folder by the name, in a repository also where the model lies in a folder of it."""
    paths = {file: root / "models" / f"{file}.gguf" for file in files}
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model_bytes(9))
    remove_model(name)
    model = name.replace("hf:o/r:", f"{HUB}/").removesuffix(".gguf")
    assert {file for file, path in paths.items() if not path.exists()} == {model, *gone}


def test_pull_completes_a_model_that_was_fetched_without_it(server: StubServer, root: Path) -> None:
    """As one that an earlier release fetched; a load does not ask the network for it."""
    add_repository(server, "someone/eye-GGUF", REPO)
    path = pull("hf:someone/eye-GGUF", ResolveOptions())
    projector = path.with_name("mmproj-eye-Q8_0.gguf")
    projector.unlink()
    assert resolve("hf:someone/eye-GGUF", ResolveOptions()) == path
    assert not projector.exists()
    assert pull("hf:someone/eye-GGUF", ResolveOptions()) == path
    assert projector.read_bytes() == REPO["mmproj-eye-Q8_0.gguf"]
    assert pull("hf:someone/eye-GGUF:mmproj-eye-f32.gguf", ResolveOptions()).name == "mmproj-eye-f32.gguf"
