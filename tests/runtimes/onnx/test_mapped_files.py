"""Weights that ONNX Runtime has mapped, cut short in the middle of a forward: the forward fails."""

import sys
from pathlib import Path

import pytest
from support.models.cut_files import cut_in_a_forward
from support.models.onnx_exports import DATA, Exporter, copied

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform == "win32", reason="Windows lets nobody cut a mapped file short")
def test_a_file_cut_short_in_a_forward_is_an_error(exported: Exporter, tmp_path: Path) -> None:
    """The forward that meets the missing pages fails, and so do all later ones."""
    folder = copied(exported(types=("Q4_K", "Q6_K")).folder, tmp_path)
    first, second = cut_in_a_forward("onnx", folder, folder / DATA)
    assert first == second
    assert first.startswith(f"{folder / DATA} was cut short or written to since it was loaded; ")
