"""Tiny models as GGUF and as our ONNX export, and exports that a test may damage."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_runtimes.onnx.runtime import Onnx
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

GRAPH, DATA = "model.onnx", "model.onnx.data"


@dataclass(frozen=True, slots=True)
class Exported:
    """A model in two forms: its GGUF, and the folder exported from it."""

    gguf: Path
    folder: Path


Exporter = Callable[..., Exported]


def export_tiny(folder: Path, name: str, types: tuple[str, ...], kv: str, changes: dict[str, Any]) -> Exported:
    """Write a tiny model of a kind, with the sizes in `changes`, and export it."""
    from edgedec_export.to_onnx import export_onnx

    gguf = write_tiny(folder / "m.gguf", replace(ARCHITECTURES[name], types=types, **changes))
    return Exported(gguf, export_onnx(gguf, folder / "exported", kv=kv))


def load(path: Path, **options: Any) -> Model:
    """Load an export for several sessions."""
    return Onnx().load(path, LoadOptions(**({"n_ctx": 128, "n_parallel": 4, "n_threads": 1} | options)))


def copied(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of an export that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def rewritten(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of an export and, as a forger would, its entry in the manifest."""
    (folder / name).write_bytes(content)
    facts = manifest(folder)
    facts["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "edgedec.json").write_text(json.dumps(facts), encoding="utf-8")


def manifest(folder: Path) -> Any:
    """Return the content of edgedec.json."""
    return json.loads((folder / "edgedec.json").read_text(encoding="utf-8"))
