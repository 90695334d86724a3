"""The order in which a name is looked up, the errors for unknown names, and the cost of a start."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.servers import StubServer, catalogue_entry, model_bytes

from edgedec.errors import ModelFormatError, ModelNotFoundError, OfflineError, PullError
from edgedec.load_options import ResolveOptions
from edgedec_models import catalogue as catalogue_module
from edgedec_models.fetching import verify
from edgedec_models.folders import config_folder, models_folder
from edgedec_models.resolve import pull, resolve

DATA = model_bytes(50_000)
WriteCatalogue = Callable[[str], None]


def entry(server_root: str = "http://127.0.0.1:9", data: bytes = DATA) -> str:
    """Return a catalogue with one model, `tiny`, behind a URL."""
    return catalogue_entry(data, {"kind": "url", "url": f"{server_root}/tiny.gguf"})


def put(folder: Path, name: str, data: bytes = DATA) -> Path:
    """Write a file into a folder as a user would."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


@pytest.fixture
def n_hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of files that were hashed."""
    hashed: list[Path] = []
    sha256_of = verify.sha256_of

    def counted(path: Path, label: str, options: ResolveOptions) -> str:
        hashed.append(path)
        return sha256_of(path, label, options)

    monkeypatch.setattr(verify, "sha256_of", counted)
    return hashed


def test_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """An existing file or folder of that name is taken first, even before the catalogue."""
    put(root / "models", "smollm2-135m.gguf")
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "smollm2-135m")
    (tmp_path / "exported").mkdir()
    assert resolve("smollm2-135m", ResolveOptions()) == Path("smollm2-135m")
    assert resolve("exported", ResolveOptions()) == Path("exported")
    assert resolve(str(tmp_path / "smollm2-135m"), ResolveOptions()) == tmp_path / "smollm2-135m"


def test_own_folder_comes_before_the_cache(
    tmp_path: Path, root: Path, catalogue: WriteCatalogue, monkeypatch: pytest.MonkeyPatch, n_hashed: list[Path]
) -> None:
    """NAME.gguf in EDGEDEC_MODELS is used for NAME unchecked, but for its header by pull; nothing is written there."""
    catalogue(entry())
    put(root / "models", "tiny.gguf")
    own = put(tmp_path / "mine", "tiny.gguf", b"GGUF of my own")
    monkeypatch.setenv("EDGEDEC_MODELS", str(own.parent))
    assert resolve("tiny", ResolveOptions()) == own
    with pytest.raises(ModelFormatError, match=re.escape(str(own))):
        pull("tiny", ResolveOptions(), force=True)
    assert os.listdir(own.parent) == ["tiny.gguf"]
    assert n_hashed == []


@pytest.mark.parametrize("kind", ["path", "address", "name", "folder"])
def test_pull_refuses_what_is_no_whole_gguf(tmp_path: Path, root: Path, catalogue: WriteCatalogue, kind: str) -> None:
    """By its path, as an address or as a name of the cache; the message names the file. A whole one is taken."""
    catalogue("")
    path = (root / "models" if kind == "name" else tmp_path) / "mine.gguf"
    path.mkdir() if kind == "folder" else put(path.parent, path.name, DATA[: len(DATA) // 2])
    asked = {"address": path.as_uri(), "name": "mine"}.get(kind, str(path))
    with pytest.raises(ModelFormatError, match=re.escape(str(path))):
        pull(asked, ResolveOptions())
    if kind != "folder":
        tiny_llama(path)
        assert pull(asked, ResolveOptions()) == path


def test_file_put_into_the_cache_is_hashed_once(
    root: Path, catalogue: WriteCatalogue, n_hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's copy of a catalogue file is hashed, and again once its size or date, which stand for it, changed."""
    catalogue(entry())
    path = put(root / "models", "tiny.gguf")
    assert resolve("tiny", ResolveOptions(offline=True)) == path
    with monkeypatch.context() as patch:
        patch.setattr(catalogue_module, "load_catalogue", None)  # not even read any more
        assert resolve("tiny", ResolveOptions(offline=True)) == path
    assert n_hashed == [path]
    os.utime(path, ns=(1, 1))
    assert resolve("tiny", ResolveOptions()) == path
    assert n_hashed == [path, path]


@pytest.mark.parametrize(
    ("data", "words"),
    [(DATA[:-1], "it has 49999 bytes where 50000 were expected"), (DATA[:-1] + b"?", "its SHA-256 is .* was expected")],
)
def test_other_file_of_that_name_is_refused(
    server: StubServer, root: Path, catalogue: WriteCatalogue, data: bytes, words: str
) -> None:
    """A wrong file in the cache is neither used nor, without force, overwritten."""
    server.add("/tiny.gguf", DATA)
    catalogue(entry(server.root))
    path = put(root / "models", "tiny.gguf", data)
    with pytest.raises(ModelFormatError, match=f"{words}.*pull --force tiny.*EDGEDEC_MODELS"):
        resolve("tiny", ResolveOptions())
    with pytest.raises(ModelFormatError):
        pull("tiny", ResolveOptions())
    assert path.read_bytes() == data
    assert pull("tiny", ResolveOptions(), force=True).read_bytes() == DATA


def test_newer_entry_is_fetched_by_pull(server: StubServer, catalogue: WriteCatalogue) -> None:
    """If the catalogue's entry changes, the stored model is used until the next pull."""
    server.add("/tiny.gguf", DATA)
    catalogue(entry(server.root))
    path = pull("tiny", ResolveOptions())
    newer = model_bytes(60_000, seed=1)
    server.add("/tiny.gguf", newer)
    catalogue(entry(server.root, newer))
    assert resolve("tiny", ResolveOptions()) == path
    assert path.read_bytes() == DATA
    assert pull("tiny", ResolveOptions()).read_bytes() == newer


def test_source_of_another_size_is_refused_at_once(server: StubServer, catalogue: WriteCatalogue, root: Path) -> None:
    """A file of another size than the catalogue's is not downloaded."""
    server.add("/tiny.gguf", DATA + b"more")
    catalogue(entry(server.root))
    with pytest.raises(PullError, match="has 50004 bytes where 50000 were expected: it is another file"):
        resolve("tiny", ResolveOptions())
    assert os.listdir(root / "models") == []


def test_cache_folder_of_the_options_wins(tmp_path: Path, root: Path) -> None:
    """Before EDGEDEC_CACHE and the platform's default; any NAME.gguf of a cache is found as NAME."""
    path, other = put(tmp_path / "here" / "models", "a.gguf"), put(root / "models", "mein modell.gguf")
    assert resolve("a", ResolveOptions(cache_dir=tmp_path / "here")) == path
    assert resolve("mein modell", ResolveOptions(offline=True)) == other
    with pytest.raises(ModelNotFoundError):
        resolve("a", ResolveOptions())


def test_platform_folders_without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without variables the platform's folders of `edgedec` are used."""
    monkeypatch.delenv("EDGEDEC_CACHE")
    monkeypatch.delenv("EDGEDEC_CONFIG")
    assert models_folder().parts[-2:] == ("edgedec", "models") or "edgedec" in models_folder().parts
    assert "edgedec" in config_folder().parts


def test_read_only_cache_is_used(root: Path, catalogue: WriteCatalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is used even if its record cannot be written."""
    catalogue(entry())
    path = put(root / "models", "tiny.gguf")

    def refuse(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("edgedec_models.storage.write_atomically", refuse)
    assert resolve("tiny", ResolveOptions()) == path
    assert os.listdir(path.parent) == ["tiny.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm-135m", r"no model is called 'smollm-135m'; did you mean smollm2-135m .*\? `edgedec list`"),
        ("smollm", r"did you mean smollm2-135m or smollm2-360m or"),
        ("llama", r"did you mean llama3\."),
        ("qwen3-", "did you mean qwen3-.*`edgedec search qwen3` those of the Hugging Face hub"),
        ("qwen3:5b", "no model is called 'qwen3:5b'; did you mean qwen3.* or .*`edgedec search qwen3 5b`"),
        ("coder", r"did you mean qwen2\.5-coder-0\.5b or qwen2\.5-coder-1\.5b or"),
        ("my poett", "did you mean my poet"),
        ("bard", "no model is called 'bard'; it is a preset of 'tiny', which edgedec run, chat and serve take;"),
        ("mein modelle", "did you mean mein modell"),
        ("zzz", "no model is called 'zzz'; `edgedec list` shows the names"),
        ("", "the path '' does not exist"),
        ("./x", r"the path '\./x' does not exist \(the current folder is [^)]*\)$"),
        ("..x", r"the path '\.\.x' does not exist"),
        ("a/b/c", "the path 'a/b/c' does not exist"),
        ("none.gguf", r"the path 'none\.gguf' does not exist"),
        ("C:\\models\\a.gguf", "the path .* does not exist"),
        ("someone/tiny", "the path 'someone/tiny' does not exist .*hf:someone/tiny"),
    ],
)
def test_unknown_names_say_what_would_work(root: Path, name: str, words: str) -> None:
    """The error for a bare name has similar names; that for a path says that it is a path."""
    put(root / "models", "mein modell.gguf")
    put(config_folder() / "presets", "my poet.toml")
    (config_folder() / "presets" / "bard.toml").write_text('model = "tiny"\n')
    with pytest.raises(ModelNotFoundError, match=words):
        resolve(name, ResolveOptions())


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["small", "small:latest", "Small:1B", "tiny", "TINY"])
def test_an_alias_stands_for_the_model(server: StubServer, root: Path, catalogue: WriteCatalogue, alias: str) -> None:
    """A name that the model has elsewhere fetches it once, under its own name; a file of that name comes first."""
    server.add("/tiny.gguf", DATA)
    catalogue(entry(server.root).replace("size_bytes", 'aliases = ["small", "small:1b"]\nsize_bytes'))
    assert (
        pull(alias, ResolveOptions()) == resolve(alias, ResolveOptions(offline=True)) == root / "models" / "tiny.gguf"
    )
    assert sorted(os.listdir(root / "models")) == ["tiny.gguf", "tiny.gguf.json"]
    own = put(root / "models", "small.gguf")
    assert resolve("small", ResolveOptions(offline=True)) == own
    assert resolve("small:1b", ResolveOptions(offline=True)) == root / "models" / "tiny.gguf"
    of_a_user = put(root / "models", "Mine.gguf")
    assert resolve("mine", ResolveOptions(offline=True)) == of_a_user


def test_other_kinds_of_names_are_left_to_others() -> None:
    """A name with an unknown scheme is left to other resolvers; pulling it is refused."""
    assert resolve("s3://bucket/a.gguf", ResolveOptions()) is None
    assert resolve("mine:model", ResolveOptions()) is None
    with pytest.raises(ModelNotFoundError, match="not a kind of name that can be pulled"):
        pull("s3://bucket/a.gguf", ResolveOptions())


@pytest.mark.parametrize("variable", ["EDGEDEC_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_by_environment(monkeypatch: pytest.MonkeyPatch, catalogue: WriteCatalogue, variable: str) -> None:
    """Both variables forbid the network unless their value means no."""
    catalogue(entry())
    monkeypatch.setenv(variable, "1")
    with pytest.raises(OfflineError, match=f"{variable} is set"):
        resolve("tiny", ResolveOptions())
    monkeypatch.setenv(variable, "0")
    with pytest.raises(OfflineError, match="the option offline is set"):
        resolve("tiny", ResolveOptions(offline=True))


@pytest.mark.slow
def test_start_imports_no_http_library(root: Path, catalogue: WriteCatalogue) -> None:
    """Resolving a stored model imports neither HTTP libraries nor the catalogue's parser."""
    catalogue(entry())
    put(root / "models", "tiny.gguf")
    resolve("tiny", ResolveOptions())
    code = (
        "import sys; from edgedec.load_options import ResolveOptions; from edgedec_models.resolve import resolve; "
        "assert resolve('tiny', ResolveOptions()); "
        "print([m for m in ('httpx', 'huggingface_hub', 'tomllib', 'zipfile', 'shutil') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "[]\n"
