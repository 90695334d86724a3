"""A GGUF that llama.cpp has mapped, cut short in the middle of a forward or written to: the forward fails."""

import os
import sys
from pathlib import Path

import pytest
from support.models.cut_files import cut_in_a_forward
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import ModelFormatError

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not known where llama.cpp has mapped the file")
def test_a_file_cut_short_in_a_forward_is_an_error(tmp_path: Path) -> None:
    """The forward that meets the missing pages fails, and so do all later ones; the process goes on."""
    path = tiny_llama(tmp_path / "m.gguf", n_embd=128, n_ff=512, n_layer=4)
    first, second = cut_in_a_forward("llamacpp", path, path)
    assert first == second
    assert first.startswith(f"{path} was cut short or written to since it was loaded; ")


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_written_to_is_an_error_where_it_is_mapped(tmp_path: Path, mmap: bool) -> None:
    """Other weights under the same KV cache are no model's; weights that were copied do not change with the file."""
    path = tiny_llama(tmp_path / "m.gguf")
    with edgedec.load(path, runtime="llamacpp", n_ctx=64, runtime_options={"mmap": mmap}, draft=None) as engine:
        expected = engine.generate("Hello", max_tokens=4, temperature=0).token_ids
        before = path.stat()
        while path.stat().st_mtime_ns == before.st_mtime_ns:
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"\0\0\0\0")
        if mmap:
            with pytest.raises(ModelFormatError, match=r"written to since it was loaded; .* load the model again"):
                engine.generate("Hello", max_tokens=4, temperature=0)
        else:
            assert engine.generate("Hello", max_tokens=4, temperature=0).token_ids == expected
