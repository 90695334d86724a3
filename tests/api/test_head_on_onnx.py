"""The head that is shipped for smollm2-135m beside an export of it: found, accepted, and of no effect on texts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models.real_models import real_model

import edgedec

pytestmark = [pytest.mark.slow, pytest.mark.model]

PROMPTS = ("Write a short story about a dog who finds a friend.", "def mean(values):\n    ")
LONG = " ".join(f"Item {i} of the list costs {3 * i} coins." for i in range(12)) + " Which items should I buy?"
N_TOKENS = 24


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export of the model, every weight with its value."""
    pytest.importorskip("onnx")
    from edgedec_export.to_onnx import export_onnx

    return export_onnx(real_model("smollm2-135m.gguf"), tmp_path_factory.mktemp("exports") / "smollm2")


@pytest.fixture(scope="module")
def plain(export: Path) -> Iterator[edgedec.Engine]:
    with edgedec.load(export, draft="off", n_ctx=512, offline=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def with_head(export: Path) -> Iterator[edgedec.Engine]:
    """The export with the head that is found for it, and no other drafter."""
    with edgedec.load(export, draft="head", n_draft_max=3, n_ctx=512, offline=True) as engine:
        yield engine


def answered(engine: edgedec.Engine, prompt: str, **how: float) -> edgedec.Generation:
    """Return the answer to a message."""
    return engine.generate(engine.chat_ids([{"role": "user", "content": prompt}]), max_tokens=N_TOKENS, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}])
def test_texts_are_equal_and_drafts_accepted(
    plain: edgedec.Engine, with_head: edgedec.Engine, how: dict[str, float]
) -> None:
    """Far more first tokens than chance would give (1 of 4,096) are right, and the head is used without a note."""
    right, tried = 0.0, 0.0
    for prompt in PROMPTS:
        found = answered(with_head, prompt, **how)
        assert found.token_ids == answered(plain, prompt, **how).token_ids
        assert found.stats.runtime == "onnx"
        assert not [reason for reason in found.stats.reasons if "head" in reason]
        right += found.stats.accepted_by_position[0]
        tried += found.stats.n_drafts
    assert right / tried > 0.15
