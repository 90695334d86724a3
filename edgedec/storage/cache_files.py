"""Where the cache lies, and which files of it and of the configuration are edgedec's: by place, name and first bytes.

Such folders may be shared with other programs. What deletes from them asks here, and leaves what is not known, and all
that lies behind a link.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

_JSON = tuple(bytes([start]) for start in b'[{"-0123456789tfn')
_ANY = (b"",)
_EMPTY = ()
_GRAPH = "[^/]+-[0-9a-f]{12}-[0-9a-f]{12}"
# By folder of the cache: the forms of names in it, and how such files begin. Forms of all releases stay listed.
_FORMS: dict[str, dict[str, tuple[bytes, ...]]] = {
    "": {"chat-history": (b'"',), r"catalogue\.toml": _ANY},  # the latter in the configuration's folder, as presets
    "presets": {r"[^/]+\.toml": _ANY},
    "tiles": {
        r"[0-9a-f]{16}\.[0-9a-f]{16}\.tiles": (b"edgedec tiles\r\n\0",),
        r"[0-9a-f]{16}\.[0-9a-f]{16}\.json": (b"{",),
        r"[0-9a-f]{16}\.partial": _ANY,
        r"[0-9a-f]{16}\.lock": _EMPTY,
    },
    "prompts": {r"[^/]+/[A-Za-z0-9_-]+\.[a-z]+(-[0-9a-f]{16})?": (b"edgedec block 1\n",)},
    "heads": {r"[0-9a-f]{16}\.path": (b"/", b"\\\\", *(bytes([drive, 58]) for drive in range(65, 91)))},
    "learned": {r"[0-9a-f]{32}\.learned": (b"edgedec learned files 1\n",)},
    "answers": {r"[0-9a-f]{32}\.answers": (b"edgedec draft store 1\n",), r"[0-9a-f]{32}\.learning/.+": _ANY},
    "probes": {r"([a-z0-9-]+|read rate)-[0-9a-f]{32}\.json": _JSON},
    "npu": {r"(\.[0-9a-f]{32}-[0-9a-f]{8}\.part|[0-9a-f]{32})/graph[^/]*": _ANY},
    "graphs": {
        rf"(\.{_GRAPH}-[0-9a-f]{{8}}\.(part|old)|{_GRAPH})/"
        r"(edgedec\.json|model\.onnx(\.data)?|vocabulary\.gguf|report\.(json|md))": _ANY,
        rf"(\.{_GRAPH}-[0-9a-f]{{8}}\.part|{_GRAPH})\.lock": _EMPTY,
    },
    "optimum": {r"[0-9a-f]{16}/pyvenv\.cfg": (b"home = ",), r"[0-9a-f]{16}\.lock": _EMPTY},
}
_TEMPORARY = re.compile(r"\.([0-9a-f]{16}|[0-9]+-[0-9]+)\.tmp$")
_HEAD_BYTES = 32


def cache_folder(cache_dir: Path | None = None) -> Path:
    """Return the root of the cache: `cache_dir`, or for None EDGEDEC_CACHE, else the platform's default."""
    if cache_dir is not None:
        return cache_dir
    if root := os.environ.get("EDGEDEC_CACHE"):
        return Path(root).expanduser()
    from platformdirs import user_cache_path  # here, because importing it takes longer than the rest of a look-up

    return user_cache_path("edgedec", appauthor=False)


def is_ours(path: Path, root: Path, kind: str) -> bool:
    """Return whether a path is a regular file that edgedec wrote, whole or in part, and no link leads to it.

    The path is below `root`, which is the folder `kind` of the cache, or for the kind "" the cache itself.
    """
    name = _TEMPORARY.sub("", path.relative_to(root).as_posix())
    form = next((form for form in _FORMS.get(kind, ()) if re.fullmatch(form, name)), None)
    try:
        places = [path, *path.parents][: len(path.parts) - len(root.parts) + bool(kind)]
        if form is None or any(place.is_symlink() for place in places) or not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return not head or any(head.startswith(start) or start.startswith(head) for start in _FORMS[kind][form])


def sort_out(root: Path, kind: str) -> tuple[list[Path], list[Path]]:
    """Return what below a folder of the cache is edgedec's, and what is not: links, and files that are not known.

    Each environment of optimum is one path, that of its folder (OSError where a folder can't be read).
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    ours, others = list[Path](), [root] if root.is_symlink() else []
    for parent, folders, names in os.walk(root, onerror=fail) if not others else ():
        links = [name for name in folders if Path(parent, name).is_symlink()]
        environments = folders if kind == "optimum" else []
        whole = [name for name in environments if is_ours(Path(parent, name, "pyvenv.cfg"), root, kind)]
        folders[:] = [name for name in folders if name not in links + whole]
        for path in (Path(parent, name) for name in (*whole, *links, *names)):
            (ours if path.name in whole or is_ours(path, root, kind) else others).append(path)
    return ours, others


def delete(path: Path, root: Path) -> None:
    """Delete what is_ours() or sort_out() knows, and the folders above, up to `root`, that are empty then (OSError)."""
    if path.is_dir():
        from shutil import rmtree  # here, as it imports three kinds of compression, and every start this file

        rmtree(path)
    else:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # other files are in one of them
        for folder in path.parents:
            if folder.is_relative_to(root):
                folder.rmdir()


def delete_folder(folder: Path, kind: str) -> None:
    """Delete edgedec's files in a folder of the folder `kind`, and the folder where it is empty then (OSError)."""
    for path in sorted(folder.iterdir(), reverse=True):
        if is_ours(path, folder.parent, kind):
            delete(path, folder)
