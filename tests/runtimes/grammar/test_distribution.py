"""Under a grammar texts come with p, renormalised over the tokens allowed: by every rule, drafted or not."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.decoding.decoding_loop import Text, p_value, plugin, two_paths
from support.models.tiny_models import BOS, EOS, byte_ids

from edgedec.decoding.generate import TokenStream
from edgedec.decoding.grammars import Grammars
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.drafter import DrafterFactory
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.grammar import Grammar
from edgedec.model import Model, Session
from edgedec.sampling import SamplingParams, distribution
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import COUPLED, Request

pytestmark = pytest.mark.slow

BOUND = 1e-4
SEEDS = range(200)
PROMPT = (BOS, *byte_ids("abcab-abd-abeab-cab"))
PARAMS = SamplingParams(temperature=3.0, top_p=1.0, frequency_penalty=0.3)  # hot, so that no few texts are all
TRUNCATED = replace(PARAMS, top_k=3, top_p=0.95)
GRAMMAR = Grammar.regex("[ab]([cd]-[abd]|-[ab]{0,2})")
DRAFTED = byte_ids("abc-x")  # x has no place in the grammar, c seldom one


@pytest.fixture(scope="module")
def session(byte_model: Model) -> Session:
    """The target's session."""
    return byte_model.session(64)


def exact(session: Session, grammars: Grammars, params: SamplingParams) -> dict[Text, float]:
    """Return the probability of every text, from plain forwards of every prefix and the masks of fresh grammars."""
    whole: dict[Text, float] = {}
    open_texts: dict[Text, float] = {(): 1.0}
    while open_texts:
        longer: dict[Text, float] = {}
        for text, above in open_texts.items():
            tokens = np.array([*PROMPT, *text], np.int32)
            constraint = grammars.open(GRAMMAR)
            for token in text:
                constraint.commit(token)
            if constraint.is_complete:
                whole[text] = above
                continue
            logits = constraint.masked(session.forward(tokens, n_past=0).logits[0])
            law = distribution(logits, params, tokens.tolist())
            for token, p in zip(law.token_ids.tolist(), law.probs.tolist(), strict=True):
                if token == EOS:
                    whole[text] = above * p
                else:
                    longer[*text, token] = above * p
        open_texts = longer
    return whole


FACTORIES: dict[str, dict[str, DrafterFactory]] = {
    "plain": {},
    "looked up": {"suffix": SuffixDrafter},
    "drawn": {"plugin": plugin(DRAFTED, two_paths)},
}


@pytest.mark.parametrize(
    ("params", "rule", "drafts"),
    [
        (PARAMS, COUPLED, "plain"),
        (TRUNCATED, COUPLED, "looked up"),
        (PARAMS, COUPLED, "drawn"),
        (PARAMS, "block", "looked up"),
        (TRUNCATED, "kseq", "drawn"),
        (PARAMS, "multipath", "drawn"),
    ],
    ids=lambda value: "truncated" if value is TRUNCATED else "whole" if value is PARAMS else str(value),
)
def test_texts_come_with_the_renormalised_probability(
    session: Session, grammars: Grammars, params: SamplingParams, rule: str, drafts: str
) -> None:
    """Texts fit the exact law, drafts of forbidden tokens among them; a law that is somewhat off does not."""
    law = exact(session, grammars, params)
    assert sum(law.values()) == pytest.approx(1)
    factories = FACTORIES[drafts]
    pool = SessionPool([SessionSlot(session, drafting=Drafting(factories, 8, always=True) if factories else None)])
    found: Counter[Text] = Counter()
    for seed in SEEDS:
        stream = TokenStream(pool, Request(PROMPT, params, seed, rule=rule), constraint=grammars.open(GRAMMAR))
        for _ in stream:
            pass
        assert stream.generation.finish_reason == "stop"
        found[stream.generation.token_ids] += 1
    assert p_value(found, law) > BOUND
    assert len(found) > 8
    off = {text: p * (3 if text[0] == DRAFTED[0] else 1) for text, p in law.items()}
    total = sum(off.values())
    assert p_value(found, {text: p / total for text, p in off.items()}) < BOUND
