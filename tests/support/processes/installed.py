"""Packages with plug-ins, installed for a test as pip would: a folder of metadata on the path of imports."""

from collections.abc import Mapping
from pathlib import Path

import pytest


def install_plugins(folder: Path, entries: Mapping[str, Mapping[str, str]], name: str = "stranger") -> Path:
    """Write the metadata of a package of version 1.0 whose entry points, by group and name, are these; return `folder`.

    Two packages of one folder need different names. Plug-ins are read once for a path of imports, so a package that is
    to be seen after others were looked for stands in a folder of its own.
    """
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in named.items())
        for group, named in entries.items()
    )
    (about / "entry_points.txt").write_text("\n".join(groups))
    return folder


def with_plugin(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, name: str, target: str) -> None:
    """Install a package with one plug-in in a new folder, for as long as a test lasts."""
    group, _, word = kind.partition(":")
    entries = {group: {f"{word}.{name}".lstrip("."): target}}
    monkeypatch.syspath_prepend(install_plugins(folder / f"package-of-{name}", entries))
