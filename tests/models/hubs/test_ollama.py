"""Models of Ollama, used where Ollama keeps them."""

import json
from pathlib import Path

import pytest
from support.processes.servers import model_bytes, sha256

from edgedec.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.load_options import ResolveOptions
from edgedec_models.hubs.ollama import ADAPTER_LAYER, MODEL_LAYER
from edgedec_models.resolve import resolve

DATA = model_bytes(5_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder that OLLAMA_MODELS names."""
    return tmp_path / "ollama"


def add_manifest(folder: Path, path: str, layers: object) -> None:
    """Write a manifest with these layers."""
    manifest = folder / "manifests" / path
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))


def add_model(folder: Path, path: str) -> Path:
    """Add a model with weights, a template and a licence; return the blob of the weights."""
    blob = folder / "blobs" / f"sha256-{sha256(DATA)}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(DATA)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'1' * 64}", "size": 3},
        {"mediaType": MODEL_LAYER, "digest": f"sha256:{sha256(DATA)}", "size": len(DATA)},
    ]
    add_manifest(folder, path, layers)
    return blob


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("registry.ollama.ai/library/qwen3/latest", "ollama:qwen3"),
        ("registry.ollama.ai/library/qwen3/0.6b", "ollama:qwen3:0.6b"),
        ("registry.ollama.ai/someone/tiny/latest", "ollama:someone/tiny:latest"),
        ("hf.co/someone/tiny-GGUF/Q4_0", "ollama:hf.co/someone/tiny-GGUF:Q4_0"),
    ],
)
def test_weights_are_found_in_place(folder: Path, path: str, name: str) -> None:
    """Names are looked up as Ollama does: in its registry and `library`, unless the name has others."""
    blob = add_model(folder, path)
    assert resolve(name, ResolveOptions(offline=True)) == blob


def test_home_folder_is_used_without_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OLLAMA_MODELS the models in the home folder are used."""
    blob = add_model(tmp_path / ".ollama" / "models", "registry.ollama.ai/library/tiny/latest")
    monkeypatch.delenv("OLLAMA_MODELS")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert resolve("ollama:tiny", ResolveOptions()) == blob


def test_unknown_model_gets_near_ones(folder: Path) -> None:
    """The error for a missing model has similar names, and says how to get it."""
    add_model(folder, "registry.ollama.ai/library/qwen3/0.6b")
    with pytest.raises(ModelNotFoundError, match=r"did you mean ollama:qwen3:0\.6b\?; get it with `ollama pull qwen3`"):
        resolve("ollama:qwen3", ResolveOptions())


@pytest.mark.parametrize("name", ["ollama:", "ollama:../x", "ollama:a/../b", "ollama:a:..", "ollama:a/b/c/d"])
def test_names_that_lead_elsewhere_are_refused(folder: Path, name: str) -> None:
    """A name with `..` is refused."""
    with pytest.raises(ModelNotFoundError, match="write ollama:NAME"):
        resolve(name, ResolveOptions())


ELSEWHERE = ["sha256:../../../etc/passwd", "sha256:abc", "sha256-" + "a" * 64, f"md5:{'a' * 64}"]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "names 0 files of weights"),
        ([{"mediaType": MODEL_LAYER, "digest": f"sha256:{'a' * 64}"}] * 2, "names 2 files of weights"),
        (["nonsense"], "not one of Ollama's"),
        (None, "not one of Ollama's"),
        ([{"mediaType": MODEL_LAYER}], "not one of Ollama's"),
        *(([{"mediaType": MODEL_LAYER, "digest": each}], "names the digest") for each in ELSEWHERE),
    ],
)
def test_odd_manifests_are_reported(folder: Path, layers: object, words: str) -> None:
    """Without exactly one file of weights the error says what it has; a digest of another form becomes no path."""
    add_manifest(folder, "registry.ollama.ai/library/x/latest", layers)
    with pytest.raises(ModelFormatError, match=words):
        resolve("ollama:x", ResolveOptions())


def test_a_model_with_an_adapter_names_both_files(folder: Path) -> None:
    """Without the adapter the text would be another one, so that the model is refused."""
    digests = [f"sha256:{digit * 64}" for digit in "ab"]
    kinds = zip((MODEL_LAYER, ADAPTER_LAYER), digests, strict=True)
    layers = [{"mediaType": kind, "digest": digest} for kind, digest in kinds]
    add_manifest(folder, "registry.ollama.ai/library/x/latest", layers)
    with pytest.raises(UnsupportedModelError, match=r"blobs/sha256-a{64}' with lora '.*blobs/sha256-b{64}'"):
        resolve("ollama:x", ResolveOptions())


def test_missing_or_truncated_weights_are_reported(folder: Path) -> None:
    """The error for missing or truncated weights mentions `ollama pull`."""
    blob = add_model(folder, "registry.ollama.ai/library/x/latest")
    blob.write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match="have 4 bytes where 5000 were expected"):
        resolve("ollama:x", ResolveOptions())
    blob.unlink()
    with pytest.raises(ModelNotFoundError, match="are missing"):
        resolve("ollama:x", ResolveOptions())
