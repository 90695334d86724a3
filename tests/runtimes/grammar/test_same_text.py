"""One request, one text, whatever is drafted; the text is one of the grammar's, and comes with p, renormalised."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.decoding_loop import Text, p_value, plugin, two_paths
from support.decoding.stub_drafter import StubDrafter
from support.models.tiny_models import BOS, EOS, byte_ids
from support.texts.schemas import CASES

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.decoding.generate import TokenStream
from edgedec.decoding.grammars import Grammars
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext, DrafterFactory
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.grammar import Grammar
from edgedec.model import Model, Session
from edgedec.sampling import SamplingParams, distribution
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import COUPLED, Generation, Request

pytestmark = pytest.mark.slow


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 1.0, "seed": 3},
    {"temperature": 1.5, "top_k": 40, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "seed": 4},
]
GRAMMARS: dict[str, Grammar] = {
    "regex": Grammar.regex(r"(foo|ba[rz]){1,4}-?\d{2}"),
    "ends anywhere": Grammar.regex("[a-e]{0,12}"),
    "lark": Grammar.lark('start: item ("," item){0,3} ";"?\nitem: "(" /[xyz]{1,3}/ ")" | "none"'),
}
ALL = {name: Grammar.json_schema(case.schema) for name, case in CASES.items()} | GRAMMARS
PROMPT = "Some words, and then:"
Texts = dict[tuple[str, int], Generation]


def texts(path: Path, draft: Any, **options: Any) -> Texts:
    """Return what every grammar leads to, drawn in every way."""
    with edgedec.load(path, runtime="cpu", n_ctx=256, draft=draft, n_threads=1, **options) as engine:
        return {
            (name, i): engine.generate(PROMPT, grammar=grammar, max_tokens=160, **way)
            for name, grammar in ALL.items()
            for i, way in enumerate(WAYS)
        }


@pytest.fixture(scope="module")
def plain(byte_path: Path) -> Texts:
    return texts(byte_path, "off")


def test_every_text_is_whole_and_valid(plain: Texts) -> None:
    """Each one ends by itself, is JSON and valid under its schema, or matches its expression; each check can fail."""
    for (name, way), generation in plain.items():
        assert generation.finish_reason == "stop", (name, way)
        if name in CASES:
            assert CASES[name].is_valid(json.loads(generation.text)), generation.text
    for name, case in CASES.items():
        assert case.is_valid(case.good), name
        assert not _valid(case.is_valid, case.bad), name
    assert len({generation.text for generation in plain.values()}) > 2 * len(ALL)


def _valid(is_valid: Any, value: Any) -> bool:
    try:
        return bool(is_valid(value))
    except (KeyError, TypeError, ValueError):
        return False


@pytest.mark.parametrize("draft", ["suffix", "common+suffix", "recycling+trigram", "auto"])
def test_drafts_change_no_text(byte_path: Path, plain: Texts, draft: str) -> None:
    """Tokens, texts and reasons are plain decoding's, in fewer steps, as forced tokens are drafted with any drafter."""
    drafted = texts(byte_path, draft)
    for key, generation in drafted.items():
        assert _shown(generation) == _shown(plain[key]), key
    if draft != "auto":  # which measures whether it pays
        steps = [sum(found.stats.n_steps for found in run.values()) for run in (drafted, plain)]
        assert steps[0] < 0.7 * steps[1]
        forced = [found.stats.drafters.get("forced", {"tried": 0, "right": 0}) for found in drafted.values()]
        assert sum(counts["right"] for counts in forced) > 300
        assert all(counts["right"] == counts["tried"] for counts in forced)


def test_drafts_are_as_long_as_was_planned(byte_path: Path, plain: Texts) -> None:
    """Where memory is planned, a draft has a node less than the rows planned for, forced tokens counted; else more."""
    within, beyond = (
        texts(byte_path, "suffix", drafting=DraftOptions(max_rows=4), memory=memory) for memory in ("500MB", None)
    )
    for key, generation in within.items():
        assert _shown(generation) == _shown(plain[key]), key
        assert len(generation.stats.accepted_by_position) <= 3, key
    assert any(len(generation.stats.accepted_by_position) == 3 for generation in within.values())
    assert any(len(generation.stats.accepted_by_position) > 3 for generation in beyond.values())


def _shown(generation: Generation) -> tuple[Any, ...]:
    outputs = [(output.token_id, output.text) for output in generation.outputs]
    return generation.text, generation.token_ids, generation.finish_reason, outputs


class Knowing(StubDrafter):
    """A drafter that knows the text, and proposes it among wrong nodes, grammatical ones and others, as a tree."""

    def __init__(self, known: Iterator[Sequence[int]]) -> None:
        self._text = list(next(known))
        self._n = 0

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose the next five tokens, each with two siblings, and a child of one of those."""
        tokens: list[int] = []
        parents: list[int] = []
        above = -1
        for token in self._text[self._n : self._n + 5]:
            tokens += [byte_ids("a")[0], byte_ids("1")[0], token, byte_ids('"')[0], EOS]
            parents += [above, above, above, len(parents), above]
            above = len(parents) - 3
        return Draft.tree(tokens, parents, [0.5] * len(tokens))

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Count the tokens that the text got."""
        self._n += len(verification.token_ids)


def test_trees_change_no_text(byte_path: Path, plain: Texts) -> None:
    """Of a tree of right, wrong and forbidden nodes the right ones stand, and the forbidden are never evaluated."""
    known = iter([generation.token_ids for generation in plain.values()])

    def knowing(context: DraftContext) -> Knowing:
        return Knowing(known)

    drafted = texts(byte_path, knowing, n_draft_max=30)
    for key, generation in drafted.items():
        assert _shown(generation) == _shown(plain[key]), key
        assert generation.stats.drafters["knowing"]["failed"] == 0
    steps = [sum(found.stats.n_steps for found in run.values()) for run in (drafted, plain)]
    assert steps[0] < 0.3 * steps[1]
    nodes = sum(found.stats.n_draft_tokens for found in drafted.values())
    proposed = sum(found.stats.drafters["knowing"]["nodes"] for found in drafted.values())
    assert nodes < 0.8 * proposed


@pytest.mark.parametrize("runtime", ["reference", "llamacpp"])
def test_other_runtimes_keep_to_the_schema(tiny_path: Path, runtime: str) -> None:
    """Their tokenizers serve as well, and greedy texts are equal with drafts."""
    schema = CASES["nested"].schema
    found = []
    for draft in ("off", "suffix"):
        with edgedec.load(tiny_path, runtime=runtime, n_ctx=128, draft=draft) as engine:
            found.append(engine.generate("abc", json_schema=schema, temperature=0, max_tokens=60).text)
    assert CASES["nested"].is_valid(json.loads(found[0]))
    assert found[0] == found[1]


def test_stop_strings_and_lengths_end_a_text_too(byte_path: Path) -> None:
    """A stop string and max_tokens cut the text as they do without a grammar, drafted or not."""
    schema = {"const": {"first": 1, "second": 2}}
    found = []
    for draft in ("off", "suffix"):
        with edgedec.load(byte_path, runtime="cpu", n_ctx=128, draft=draft, n_threads=1) as engine:
            for options in ({"stop": ('", "sec', '"sec', "1,")}, {"max_tokens": 9}, {"stop": ("2}!",)}):
                generation = engine.generate("x", json_schema=schema, temperature=0, **options)
                found.append((generation.text, generation.finish_reason))
    assert found[:3] == found[3:]
    whole = '{"first": 1, "second": 2}'
    assert found[:3] == [('{"first": ', "stop"), (whole[:9], "length"), (whole, "stop")]


def test_requests_at_the_same_time_keep_to_their_own(byte_path: Path, plain: Texts) -> None:
    """Threads that share forwards, and a vocabulary, get the texts that each gets alone; so does an event loop."""
    names = list(ALL)
    with edgedec.load(byte_path, runtime="cpu", n_ctx=256, n_parallel=3, n_threads=1) as engine:

        def work(name: str) -> Generation:
            return engine.generate(PROMPT, grammar=ALL[name], max_tokens=160, **WAYS[1])

        async def both(*schemas: Mapping[str, Any]) -> list[Generation]:
            asked = (engine.agenerate(PROMPT, json_schema=schema, max_tokens=160, **WAYS[0]) for schema in schemas)
            return list(await asyncio.gather(*asked))

        with ThreadPoolExecutor(4) as pool:
            together = dict(zip(names, pool.map(work, names), strict=True))
        waited = asyncio.run(both(CASES["nested"].schema, CASES["union"].schema))
    assert {name: _shown(found) for name, found in together.items()} == {n: _shown(plain[n, 1]) for n in names}
    assert [found.text for found in waited] == [plain["nested", 0].text, plain["union", 0].text]


BOUND = 1e-4
SEEDS = range(200)
LAW_PROMPT = (BOS, *byte_ids("abcab-abd-abeab-cab"))
PARAMS = SamplingParams(temperature=3.0, top_p=1.0, frequency_penalty=0.3)  # hot, so that no few texts are all
TRUNCATED = replace(PARAMS, top_k=3, top_p=0.95)
GRAMMAR = Grammar.regex("[ab]([cd]-[abd]|-[ab]{0,2})")
DRAFTED = byte_ids("abc-x")  # x has no place in the grammar, c seldom one


@pytest.fixture(scope="module")
def session(byte_model: Model) -> Session:
    return byte_model.session(64)


def exact(session: Session, grammars: Grammars, params: SamplingParams) -> dict[Text, float]:
    """Return the probability of every text, from plain forwards of every prefix and the masks of fresh grammars."""
    whole: dict[Text, float] = {}
    open_texts: dict[Text, float] = {(): 1.0}
    while open_texts:
        longer: dict[Text, float] = {}
        for text, above in open_texts.items():
            tokens = np.array([*LAW_PROMPT, *text], np.int32)
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
        stream = TokenStream(pool, Request(LAW_PROMPT, params, seed, rule=rule), constraint=grammars.open(GRAMMAR))
        for _ in stream:
            pass
        assert stream.generation.finish_reason == "stop"
        found[stream.generation.token_ids] += 1
    assert p_value(found, law) > BOUND
    assert len(found) > 8
    off = {text: p * (3 if text[0] == DRAFTED[0] else 1) for text, p in law.items()}
    total = sum(off.values())
    assert p_value(found, {text: p / total for text, p in off.items()}) < BOUND
