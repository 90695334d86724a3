"""Trees that the shipped head draws for smollm2-135m: under each rule texts come as often as plain forwards say."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.decoding.decoding_loop import Text, exact, p_value
from support.models.real_models import real_model

import edgedec
import edgedec_models

pytestmark = [pytest.mark.slow, pytest.mark.model]

HEAD = Path(edgedec_models.__file__).parent / "heads" / "smollm2-135m.head.gguf"
PROMPT = "The colours of the flag are red,"
N_TOKENS, N_SEEDS, BOUND = 3, 54, 1e-4


@pytest.fixture(scope="module")
def engine() -> Any:
    """The model with its head, which drafts in every step."""
    model = real_model("smollm2-135m.gguf")
    with edgedec.load(
        model, runtime="cpu", draft="head", draft_head=HEAD, n_ctx=64, n_draft_max=5, offline=True
    ) as loaded:
        yield loaded


@pytest.mark.parametrize("rule", ["recursive", "kseq", "multipath"])
def test_drawn_trees_keep_the_models_distribution(engine: Any, rule: str) -> None:
    """Three tokens, of which the head drafts the last two, over 54 seeds: chi-square against enumerated laws."""
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
    session = engine.session(64)
    law = exact(session, engine.prompt_ids(PROMPT), engine.requests.sampling(**options), N_TOKENS)
    session.close()
    texts, n_drafted, n_accepted, n_trees = Counter[Text](), 0, 0, 0
    for seed in range(N_SEEDS):
        made = engine.generate(PROMPT, seed=seed, verify=rule, max_tokens=N_TOKENS + 2, ignore_end=True, **options)
        texts[made.token_ids[:N_TOKENS]] += 1
        n_drafted += made.stats.n_draft_tokens
        n_accepted += made.stats.n_accepted_tokens
        n_trees += not any("as drafts are chains" in reason for reason in made.stats.reasons)
    assert len(law) == 3**N_TOKENS
    assert n_trees == N_SEEDS
    assert 0.1 < n_accepted / n_drafted < 0.9
    assert p_value(texts, law) > BOUND
