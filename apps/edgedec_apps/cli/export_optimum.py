"""edgedec export --via optimum: a Hugging Face checkpoint of an architecture that we have no code for."""

from pathlib import Path
from typing import Any

from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken, OnProgress
from edgedec.resolver import ResolveOptions
from edgedec_apps.cli.terminal import one_line, say
from edgedec_export.folder import read_manifest
from edgedec_export.optimum.environment import NEEDED_BYTES, environment_folder, is_ready
from edgedec_export.optimum.export import export_via_optimum, find_checkpoint
from edgedec_models.folders import cache_folder
from edgedec_models.offline import offline_reason


def make_via_optimum(
    model: str, out: Path, *, offline: bool, force: bool, quiet: bool, on_progress: OnProgress, cancel: CancelToken
) -> dict[str, Any]:
    """Export, and return what was made.

    Raises:
        EdgedecError: As `export_via_optimum`.
    """
    find_checkpoint(model)  # before anything is said or fetched
    environment = environment_folder(cache_folder())
    offline = offline_reason(ResolveOptions(offline=offline)) is not None
    if not quiet and not offline and not is_ready(environment):
        room = format_bytes(NEEDED_BYTES)
        say(one_line(f"installing optimum and torch into {environment}, once; up to {room}, some minutes"))
    folder = export_via_optimum(
        model, out, environment=environment, offline=offline, force=force, on_progress=on_progress, cancel=cancel
    )
    facts = read_manifest(folder) or {}
    n_bytes = sum(entry["bytes"] for entry in facts["files"].values())
    return {"model": model, "folder": str(folder), "bytes": n_bytes, **facts, "report": None}
