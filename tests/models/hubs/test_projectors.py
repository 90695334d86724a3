"""A model's picture encoder comes with it from a repository, and goes with it."""

from pathlib import Path

import pytest
from support.processes.servers import StubServer, add_repository, model_bytes

from edgedec.load_options import ResolveOptions
from edgedec_models.cache import list_models, remove_model
from edgedec_models.hubs.hub_spec import choose_projector
from edgedec_models.resolve import pull, resolve

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
