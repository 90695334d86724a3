"""From a model's name to its file."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.processes.rights import as_anybody

from edgedec import plugins
from edgedec.errors import ModelNotFoundError, StorageError
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve

OFFLINE = ResolveOptions(offline=True)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_may_not_be_looked_into(tmp_path: Path) -> None:
    """A model there is a StorageError that names it, not one that does not exist; without a folder it is the latter."""
    options = ResolveOptions(cache_dir=tmp_path, offline=True)
    with TemporaryDirectory() as name:  # pytest's own are closed to others
        folder = Path(name) / "closed"
        folder.mkdir()
        model = folder / "m.gguf"
        model.write_bytes(b"GGUF")
        assert resolve(model, options) == model
        folder.chmod(0)
        with as_anybody():
            for path in (model, folder / "no.gguf"):
                with pytest.raises(StorageError, match=r"(m|no)\.gguf: no permission to read it \(Permission denied\)"):
                    resolve(path, options)
        folder.chmod(0o700)
        with pytest.raises(ModelNotFoundError, match="does not exist"):
            resolve(folder / "no.gguf", options)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_names_are_found_from_a_folder_that_may_not_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver's answer counts, whether or not a file of that name can be looked for here."""
    monkeypatch.setattr(plugins.Plugin, "load", lambda plugin: lambda name, options: tmp_path / name)

    def denied(path: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", denied)
    assert resolve("a-name", OFFLINE) == tmp_path / "a-name"
