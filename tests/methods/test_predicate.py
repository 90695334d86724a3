"""Constraints that a function says, and the weights of constrained texts, against enumerated laws."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.decoding.decoding_loop import Text
from support.models.tiny_models import BOS, EOS, byte_ids

import edgedec
from edgedec.api.branching import partial_texts
from edgedec.constraint import Constraint, DrawPlace
from edgedec.decoding.generate import TokenStream
from edgedec.decoding.grammars import Grammars
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec.model import Model, Session
from edgedec.sampling import Noise, SamplingParams, distribution
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import Generation, Request
from edgedec_methods.constrained import constrained
from edgedec_methods.futures import Futures
from edgedec_methods.predicate import AnyText, PredicateConstraint

pytestmark = pytest.mark.slow

PROMPT = (BOS, *byte_ids("abcab-abd-abeab-cab"))
PARAMS = SamplingParams(temperature=3.0, top_p=1.0, max_tokens=6)
GRAMMAR = Grammar.regex("[ab]([cd]-[abd]|-[ab]{1,2})")
WHOLE = re.compile("[ab]([cd]-[abd]|-[ab]{1,2})")
BEGINNINGS = re.compile("|".join(["", "[ab]", "[ab][cd]", "[ab][cd]-", "[ab][cd]-[abd]", "[ab]-", "[ab]-[ab]{1,2}"]))


def in_grammar(text: str, is_end: bool) -> bool:
    """Say what the grammar says."""
    return (WHOLE if is_end else BEGINNINGS).fullmatch(text) is not None


@pytest.fixture(scope="module")
def session(byte_model: Model) -> Session:
    """The target's session."""
    return byte_model.session(64)


def generated(session: Session, params: SamplingParams, seed: int, constraint: Constraint | None) -> Generation:
    """Generate once, drafting what is looked up."""
    pool = SessionPool([SessionSlot(session, drafting=Drafting({"suffix": SuffixDrafter}, 8, always=True))])
    stream = TokenStream(pool, Request(PROMPT, params, seed), constraint=constraint)
    for _ in stream:
        pass
    return stream.generation


def ended(constraint: Callable[[], Constraint], session: Session, params: SamplingParams) -> dict[Text, list[float]]:
    """Return for every text p of the model, and the product of Z, by masks; an end token is part of p and Z."""
    found: dict[Text, list[float]] = {}
    texts: dict[Text, list[float]] = {(): [1.0, 1.0]}
    while texts:
        longer: dict[Text, list[float]] = {}
        for text, (p_text, z_text) in texts.items():
            now = constraint()
            for token in text:
                now.commit(token)
            if now.is_complete:
                found[text] = [p_text, z_text]
                continue
            row = session.forward(np.array([*PROMPT, *text], np.int32), n_past=0).logits[0]
            law = distribution(row, params).dense(len(row))
            allowed = np.zeros(len(row), np.bool_)
            mask = now.allowed()[: len(row)]
            allowed[: len(mask)] = mask
            for token in np.flatnonzero(allowed).tolist():
                entry = [p_text * float(law[token]), z_text * float(law[allowed].sum())]
                (found if token == EOS else longer)[text if token == EOS else (*text, token)] = entry
        texts = longer
    return found


def test_a_texts_weight_is_the_mass_that_its_masks_allowed(session: Session, grammars: Grammars) -> None:
    """constraint_logprob is the sum of log Z, with drafts, too; p / product(Z) is the law that texts are drawn by."""
    laws = ended(lambda: grammars.open(GRAMMAR), session, PARAMS)
    assert sum(p / z for p, z in laws.values()) == pytest.approx(1)
    texts = set()
    for seed in range(30):
        found = generated(session, PARAMS, seed, grammars.open(GRAMMAR))
        assert found.constraint_logprob == pytest.approx(math.log(laws[found.token_ids][1]), abs=1e-4)
        texts.add(found.token_ids)
    assert len(texts) > 8
    greedy = generated(session, SamplingParams(temperature=0, max_tokens=6), 0, grammars.open(GRAMMAR))
    at_one = ended(lambda: grammars.open(GRAMMAR), session, SamplingParams(temperature=1, top_p=1))
    assert greedy.constraint_logprob == pytest.approx(math.log(at_one[greedy.token_ids][1]), abs=1e-4)
    assert generated(session, PARAMS, 0, None).constraint_logprob is None


@pytest.mark.parametrize(
    "params", [PARAMS, SamplingParams(temperature=1.0, top_p=1.0, frequency_penalty=0.5), SamplingParams(temperature=0)]
)
def test_a_predicate_gives_the_texts_of_the_mask(session: Session, grammars: Grammars, params: SamplingParams) -> None:
    """Seed by seed: the first token in order that the function takes is the one drawn among all that a mask takes."""
    tokenizer = session.model.tokenizer
    for seed in range(12):
        masked = generated(session, params, seed, grammars.open(GRAMMAR))
        asked = PredicateConstraint(AnyText(tokenizer), in_grammar, tokenizer)
        found = generated(session, params, seed, asked)
        assert (found.token_ids, found.is_whole) == (masked.token_ids, True)
        assert (found.constraint_logprob is None) == params.greedy
        methods = {"predicate": lambda text, is_end: "bd" not in text}
        both = grammars.open(GRAMMAR, Request(PROMPT, params, seed, methods=methods))
        mixed = generated(session, params, seed, both)
        assert WHOLE.fullmatch(mixed.text)
        assert "bd" not in mixed.text


def test_the_estimated_weights_are_unbiased() -> None:
    """E[w where v is drawn] = p(v) for every allowed token, over the noise of many seeds: properly weighted."""
    p = np.array([0.45, 0.02, 0.2, 0.03, 0.25, 0.05])
    allowed = "bde"

    class Six:
        n_vocab = 6

        def piece(self, token_id: int) -> bytes:
            return b"abcdef"[token_id : token_id + 1]

        def is_end(self, token_id: int) -> bool:
            return False

    tokenizer: Any = Six()
    row, params, n = np.log(p).astype(np.float32), SamplingParams(temperature=1, top_p=1), 6000
    weights = np.zeros((n, 6))
    tests = 0

    def predicate(text: str, is_end: bool) -> bool:
        nonlocal tests
        tests += 1
        return text in allowed

    for seed in range(n):
        constraint = PredicateConstraint(AnyText(tokenizer), predicate, tokenizer)
        token = constraint.choose(DrawPlace(row, params, (), Noise(seed), 7), ())
        weights[seed, token] = math.exp(constraint.log_mass(row, (), 1.0))
    for token in range(6):
        expected = p[token] if "abcdef"[token] in allowed else 0.0
        error = weights[:, token].std() / math.sqrt(n)
        assert weights[:, token].mean() == pytest.approx(expected, abs=4 * error)
    assert tests / n < 4.5


def test_what_the_engine_says_of_predicates(byte_path: Any) -> None:
    """The option works beside a schema; what can't be kept is refused; failures and dead ends are named."""
    with edgedec.load(byte_path, runtime="cpu", draft="auto", n_ctx=128) as engine:
        options: dict[str, Any] = {"max_tokens": 40, "temperature": 2.0, "top_p": 1.0, "seed": 3}
        even = engine.generate(
            "x",
            json_schema={"type": "integer", "minimum": 10, "maximum": 99},
            predicate=lambda text, is_end: len(text) < 2 or int(text) % 7 == 0,
            **options,
        )
        assert int(even.text) % 7 == 0
        assert even.constraint_logprob is not None
        assert even.constraint_logprob < 0
        short = engine.generate("x", predicate=lambda text, is_end: len(text) <= 3 and text.isascii(), **options)
        assert len(short.text) <= 3
        assert (short.finish_reason, short.is_whole) == ("stop", True)
        for more, match in (
            ({"verify": "block"}, "verify must be 'coupled'"),
            ({"json_close": True, "json_schema": {}}, "json_close"),
            ({"ignore_end": True}, "ignore_end"),
        ):
            with pytest.raises(RequestError, match=match):
                engine.generate("x", predicate=in_grammar, **options, **more)
        with pytest.raises(RequestError, match="predicate is 'yes'; it must be a function or None"):
            engine.generate("x", predicate="yes", **options)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="no token keeps to the constraint after 'a'"):
            engine.generate("x", predicate=lambda text, is_end: text == "a" and not is_end, **options)
        with pytest.raises(RequestError, match="the predicate failed: ZeroDivisionError"):
            engine.generate("x", predicate=lambda text, is_end: bool(1 / 0), **options)
        assert len(engine.generate("x", **options).token_ids) > 0


def test_futures_of_a_prompt(byte_path: Any) -> None:
    """Drafts change no text, alone or with others; what was learned does; what does not go with it is refused."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 2.0}
    found = list[list[tuple[int, ...]]]()
    for draft in ("auto", "suffix", "off"):
        with edgedec.load(byte_path, runtime="cpu", draft=draft, n_ctx=128, n_threads=1) as engine:
            known = Futures()
            texts = [engine.generate("x", json_schema=schema, futures=known, seed=i, **options) for i in range(4)]
            texts += engine.samples("x", 4, json_schema=schema, futures=known, seed=9, **options)
            found.append([text.token_ids for text in texts])
            assert len(known) > 1
            assert all(text.constraint_logprob is not None for text in texts)
            again = [engine.generate("x", json_schema=schema, futures=known, seed=i, **options) for i in range(4)]
            assert [text.token_ids for text in again] != found[-1][:4]
            for more, match in (
                ({"temperature": 0}, "temperature"),
                ({"top_p": 0.9}, "top_p"),
                ({"frequency_penalty": 1.0}, "frequency_penalty"),
                ({"logit_bias": {5: 1.0}}, "logit_bias"),
                ({"json_close": True}, "json_close"),
                ({"predicate": in_grammar}, "predicate"),
                ({"futures": {}}, "futures is a dict"),
                ({"json_schema": None}, "needs a grammar"),
                ({"json_schema": {"type": "array", "items": {}, "uniqueItems": True}}, "uniqueItems"),
            ):
                with pytest.raises(RequestError, match=match):
                    engine.generate("x", **{"json_schema": schema, "futures": known, **options, **more})
    assert found[0] == found[1] == found[2]


def test_weighted_texts_of_an_engine(byte_path: Any) -> None:
    """One text is the one of generate(); the mean of exp(log_mass) over many is the probability to keep the grammar."""
    with edgedec.load(byte_path, runtime="cpu", draft="off", n_ctx=128, n_threads=1) as engine:
        opener = engine.requests.constraint_opener(grammar=GRAMMAR)
        for seed in range(5):
            with partial_texts(engine, PROMPT, max_tokens=6) as texts:
                one = constrained(texts, 1, opener, temperature=3.0, seed=seed).text
            alone = engine.generate(PROMPT, grammar=GRAMMAR, temperature=3.0, top_p=1.0, seed=seed, max_tokens=6)
            assert one.token_ids == alone.token_ids
        with partial_texts(engine, PROMPT, max_tokens=6) as texts:
            many = constrained(texts, 128, opener, temperature=3.0, seed=7)
            assert all(WHOLE.fullmatch(texts.text(text)) for text in many.texts)
        session = engine.session(64)
        laws = ended(lambda: Grammars(engine.tokenizer).open(GRAMMAR), session, PARAMS)
        session.close()
        assert math.exp(many.log_mass) == pytest.approx(sum(p for p, _ in laws.values()), rel=0.5)
        wrong: tuple[dict[str, Any], ...] = {}, {"json_schema": {}, "grammar": GRAMMAR}
        for options in wrong:
            with partial_texts(engine, PROMPT, max_tokens=6) as texts, pytest.raises(RequestError, match="grammar"):
                constrained(texts, 2, engine.requests.constraint_opener(**options))
