"""A draft model on the CPU that goes on while an export on the NPU's emulator verifies."""

from pathlib import Path
from typing import Any

import pytest

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.errors import RuntimeUnavailableError
from edgedec_runtimes.npu.graphs import npu_devices
from edgedec_runtimes.onnx.library import load_library

PROMPT = "one two one two one two one"
WAYS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 5}]


def test_the_text_is_plain_decodings(exported: Path, source: Path) -> None:
    """Greedy and with a seed; the draft model on the cpu runtime drafts while the emulator computes."""
    try:
        npu_devices(load_library())
    except RuntimeUnavailableError as error:
        pytest.skip(str(error))
    with edgedec.load(
        exported,
        runtime="npu",
        draft="model",
        draft_model=source,
        drafting=DraftOptions(overlap=True),
        n_draft_max=5,
        offline=True,
    ) as engine:
        for way in WAYS:
            plain = engine.generate(PROMPT, max_tokens=24, ignore_end=True, draft=False, **way)
            found = engine.generate(PROMPT, max_tokens=24, ignore_end=True, **way)
            assert found.token_ids == plain.token_ids
            assert found.stats.reasons == []
            assert found.stats.n_steps < plain.stats.n_steps
            assert found.stats.drafters["model"]["ahead"] > 0
