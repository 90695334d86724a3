"""Keeps graphs that were compiled for an NPU on the disk: compiling takes seconds to minutes, loading takes less.

ONNX Runtime writes a compiled graph as an ONNX file with one node (EPContext), and its data beside the file. Both lie
in a folder of their own, which gets its final name when it is complete.
"""

import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

GRAPH = "graph.onnx"

Open = Callable[[Path | None, dict[str, str]], Any]
"""Opens the compiled graph at a path, or the export's graph for None, with entries of configuration."""


def open_kept(folder: Path | None, open_graph: Open) -> Any:
    """Return an ONNX Runtime session of the compiled graph in a folder; compile the graph where it is not there.

    A graph that was compiled is kept in the folder, if the folder can be written.

    Args:
        folder: The folder of this one compiled graph; None to keep nothing.
        open_graph: Opens the graph; what it raises for the export's graph is passed on.
    """
    if folder is None:
        return open_graph(None, {})
    if (folder / GRAPH).is_file():
        try:
            return open_graph(folder / GRAPH, {})
        except Exception:  # made by an older driver, or damaged: it is replaced
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
