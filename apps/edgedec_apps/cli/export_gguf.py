"""edgedec export --to gguf: another type, some of the layers, or a Hugging Face checkpoint as a GGUF."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import FILE_TYPE_NAMES
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken, OnProgress
from edgedec_apps.cli.terminal import one_line, say
from edgedec_export.to_gguf import export_gguf


@dataclass(frozen=True, slots=True)
class GGUFOptions:
    """What was asked for, as `export_gguf` takes it."""

    type_name: str | None = None
    layers: str | None = None
    allow_requantize: bool = False


def make_gguf(
    source: Path, out: Path, options: GGUFOptions, force: bool, on_progress: OnProgress, cancel: CancelToken
) -> dict[str, Any]:
    """Export, and return what was made.

    Raises:
        EdgedecError: As `export_gguf`.
    """
    path = export_gguf(
        source,
        out,
        type_name=options.type_name,
        layers=options.layers,
        allow_requantize=options.allow_requantize,
        force=force,
        on_progress=on_progress,
        cancel=cancel,
    )
    made = read_gguf(path)
    number = made.metadata.get("general.file_type")
    return {
        "file": str(path),
        "bytes": made.n_bytes,
        "type": FILE_TYPE_NAMES.get(number) if isinstance(number, int) else None,
        "n_layer": made.metadata.get(f"{made.metadata.get('general.architecture')}.block_count"),
    }


def default_file(name: str, options: GGUFOptions) -> Path:
    """Return the name of a result in the current folder.

    >>> default_file("tiny-f16", GGUFOptions("q4_k_m", "0-3,8")).name
    'tiny-f16-layers-0-3,8-Q4_K_M.gguf'
    """
    layers = f"-layers-{''.join(options.layers.split())}" if options.layers else ""
    kind = f"-{options.type_name.upper()}" if options.type_name else ""
    return Path(f"{name}{layers}{kind}.gguf")


def say_gguf(document: dict[str, Any]) -> None:
    """Tell a person what was made."""
    size = format_bytes(document["bytes"])
    facts = ", ".join(str(fact) for fact in (size, document["type"], f"{document['n_layer']} layers") if fact)
    say(one_line(f"{document['file']}: {facts}; run it with: edgedec run {document['file']}"))
