"""Graphs compiled for an NPU, kept on the disk: compiling takes seconds to minutes, loading what was compiled little.

ONNX Runtime writes a compiled graph as an ONNX file with one node (EPContext), its data beside it. Both lie in a folder
of their own, which gets its name when it is complete.
"""

import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

GRAPH = "graph.onnx"

Open = Callable[[Path | None, dict[str, str]], Any]
"""Opens a compiled graph, or with None the export's, with these entries of configuration."""


def open_kept(folder: Path | None, open_graph: Open) -> Any:
    """Return a session of the graph kept in a folder, or compile it and keep it there.

    Where the folder can't be written, or holds what can't be opened, the graph is compiled all the same.

    Args:
        folder: Of this one compiled graph; None to keep nothing.
        open_graph: Raises what it likes when the export's graph can't be opened.
    """
    if folder is None:
        return open_graph(None, {})
    if (folder / GRAPH).is_file():
        try:
            return open_graph(folder / GRAPH, {})
        except Exception:  # of an older driver, or damaged: it is of no use, and is replaced
            shutil.rmtree(folder, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}.part")
    try:
        temporary.mkdir(parents=True)
    except OSError:
        return open_graph(None, {})
    try:
        session = open_graph(None, _keeping(temporary / GRAPH))
        with suppress(OSError):  # another process kept it first
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return session


def _keeping(path: Path) -> dict[str, str]:
    return {"ep.context_enable": "1", "ep.context_file_path": str(path), "ep.context_embed_mode": "0"}
