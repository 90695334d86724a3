"""FreeDave writes the text of static decoding in fewer forwards."""

import re
from pathlib import Path

import pytest
from support.decoding.plain_denoising import FORMS, write_model

import edgedec
from edgedec.api.options import Lossy
from edgedec.sequence import Generation

pytestmark = pytest.mark.slow


def text(path: Path, rule: str, temperature: float, n_parallel: int = 1) -> tuple[Generation, int]:
    """Return a text, and in how many forwards it came."""
    lossy = Lossy(methods={"diffusion": {"denoise": rule}})
    with edgedec.load(path, runtime="cpu", n_ctx=96, n_threads=1, lossy=lossy, n_parallel=n_parallel) as engine:
        found = engine.generate([1, *range(70, 79)], max_tokens=30, temperature=temperature, seed=1, ignore_end=True)
    counts = re.search(r"in (\d+) forwards", found.stats.explanation[-1])
    assert counts is not None
    return found, int(counts[1])


@pytest.mark.parametrize("form", FORMS)
def test_the_text_is_that_of_static_decoding(tmp_path: Path, form: str) -> None:
    """In fewer forwards, greedily and drawn, on a session of its own and on one of several."""
    path = write_model(tmp_path / "m.gguf", form)
    for temperature, n_parallel in ((0.0, 1), (1.0, 2)):
        static, n_static = text(path, "schedule:1", temperature)
        ahead, n_ahead = text(path, "free_dave:3", temperature, n_parallel)
        assert ahead.token_ids == static.token_ids
        assert n_ahead < n_static
