"""Fixtures of the onnx runtime's tests."""

from typing import Any

import pytest
from support.models.onnx_exports import Exported, Exporter, export_tiny


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exporter:
    """Return a function that exports a tiny model of a kind, each once."""
    pytest.importorskip("onnx")
    made: dict[tuple[object, ...], Exported] = {}

    def export(name: str = "llama", types: tuple[str, ...] = ("F32",), kv: str = "f32", **changes: Any) -> Exported:
        key = (name, types, kv, *sorted(changes.items()))
        if key not in made:
            made[key] = export_tiny(tmp_path_factory.mktemp("exports"), name, types, kv, changes)
        return made[key]

    return export
