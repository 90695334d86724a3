"""FreeDave writes the text of static decoding in fewer forwards."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.decoding.plain_denoising import FORMS, write_model

import edgedec
from edgedec.api.options import Lossy
from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem
from edgedec.sampling import SamplingParams
from edgedec.sequence import Generation
from edgedec_methods.diffusion.block_diffusion import Diffusion
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow


def text(path: Path, rule: str, temperature: float, n_parallel: int = 1) -> tuple[Generation, int]:
    """Return a text, and in how many forwards it came."""
    lossy = Lossy(methods={"diffusion": {"denoise": rule}})
    with edgedec.load(path, runtime="cpu", n_ctx=320, n_threads=1, lossy=lossy, n_parallel=n_parallel) as engine:
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


def test_states_ahead_fit_into_what_is_planned(tmp_path: Path) -> None:
    """Rows of logits are at most three blocks with those that the block keeps, and forks fit into the context."""
    path, seen = write_model(tmp_path / "m.gguf", "blocks"), list[tuple[int, int]]()
    with Cpu().load(path, LoadOptions(n_threads=1, n_ctx=192, max_rows=1)) as model:
        forward = model.forward

        def counted(items: Sequence[ForwardItem]) -> list[Forward]:
            wanted = [len(item.rows) for item in items]
            seen.append(
                (8 - wanted[0] + 2 * sum(wanted) - wanted[0], items[0].n_past + items[0].n_rows + 64 * (len(items) - 1))
            )
            return forward(items)

        model.forward = counted  # type: ignore[method-assign]
        session = Diffusion("free_dave:8").session(model.session(192), None)
        prompt = np.array([1, *range(70, 79)], np.int32)
        with session.generating(len(prompt), SamplingParams(temperature=0.0)):
            row = session.forward(prompt, n_past=0).logits[0]
            for place in range(len(prompt), 180):
                row = session.forward(np.array([row.argmax()], np.int32), n_past=place).logits[0]
        session.close()
    assert max(rows for rows, _ in seen) in range(18, 25)
    assert max(tokens for _, tokens in seen) in range(129, 193), "a fork has a page of its own"
