"""A text thinks first and then keeps to its grammar: with a budget, with and without drafts, by marks of any tokens."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.models.pieces import Pieces
from support.models.real_models import real_model

import edgedec
from edgedec.constraint import Constraint
from edgedec.errors import OptionError, RequestError
from edgedec.thought_marks import Thoughts, thoughts_of
from edgedec.thoughts import Anything, ThinkingConstraint, ThinkingVocabulary

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
PIECES = ("<end>", "<", "think", ">", "</", "<think>", "</think>", ">x", "> ", " ", "a", "1", "</think>1", "x</think> ")
THINK = Thoughts("<think>", "</think>", "\n</think>\n\n")
HARMONY = Thoughts("<|c|>analysis<|m|>", "<|e|>", "<|e|><|c|>final<|m|>", "<|c|>final<|m|>", "<|c|>final<|m|>")


class Ones(Anything):
    """A grammar whose texts are ones."""

    may_end = True

    def allowed(self) -> np.ndarray:
        """Return that a one or the end may follow."""
        return np.array([piece in ("1", "<end>") for piece in PIECES])

    def advance(self, token_id: int) -> bool:
        """Take a one."""
        return PIECES[token_id] == "1"


def constraint(thoughts: Thoughts, pieces: Sequence[str] = PIECES) -> ThinkingConstraint:
    """Return the constraint of texts that think, then are ones."""
    return ThinkingConstraint(Constraint(Ones(len(pieces))), thoughts, ThinkingVocabulary(Pieces(pieces), thoughts))  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    choices=st.lists(st.integers(0, 99), min_size=1, max_size=14),
    opened=st.booleans(),
    budget=st.sampled_from([None, 0, 1, 3]),
)
def test_a_path_is_allowed_as_the_text_is(choices: list[int], opened: bool, budget: int | None) -> None:
    """What may follow a text and a path is what may follow the longer text, and each text is thoughts and then ones."""
    thoughts = Thoughts("<think>", "</think>", "\n</think>\n\n", opened=opened, budget=budget)
    whole, text = constraint(thoughts), list[int]()
    for choice in choices:
        allowed = whole.allowed(text)
        assert allowed.any() or text[-1:] == [0]
        ids = np.flatnonzero(allowed)
        if not len(ids):
            break
        text.append(int(ids[choice % len(ids)]))
        assert whole.allows(text[:-1], text[-1]) or text[-1] == 0
        for cut in range(len(text)):
            behind = constraint(thoughts)
            for token_id in text[:cut]:
                assert behind.commit(token_id) == token_id
            assert behind.allowed(text[cut:-1]).tolist() == allowed.tolist()
        if text[-1] == 0:
            break
    said = "".join(PIECES[i] for i in text if i)
    opening, _, rest = ("", "", said) if opened else said.partition("<think>")
    _, closed, answer = rest.partition("</think>")
    assert not opening.strip("1")
    assert not answer.strip(" 1")
    thinks = opened or "<think>" in said
    assert not thinks or budget is None or closed or len(text) <= budget + 6


@settings(max_examples=60)
@example(choices=[98, 1, 1, 1, 1, 0], budget=1)  # "> " in place of ">" is no mark
@given(choices=st.lists(st.integers(0, 99), min_size=1, max_size=14), budget=st.sampled_from([None, 1, 3]))
def test_a_mark_of_many_tokens_before_free_text(choices: list[int], budget: int | None) -> None:
    """A text that begins like the mark is free text where it goes on otherwise, and thinks where it is the mark."""
    pieces = [piece for piece in PIECES if "<think>" not in piece]
    thoughts = replace(THINK, budget=budget)
    vocabulary = ThinkingVocabulary(Pieces(pieces), thoughts)  # type: ignore[arg-type]

    def made() -> ThinkingConstraint:
        return ThinkingConstraint(Constraint(Anything(len(pieces))), thoughts, vocabulary)

    text = list[int]()
    for choice in (*([1, 2, 3][: choices[0] % 4]), *choices):
        allowed = made().allowed(text)
        ids = np.flatnonzero(allowed)
        text.append(choice if choice < len(pieces) and allowed[choice] else int(ids[choice % len(ids)]))
        for cut in range(len(text)):
            behind = made()
            for token_id in text[:cut]:
                behind.commit(token_id)
            assert behind.allowed(text[cut:-1]).tolist() == allowed.tolist()
            assert behind.may_end or pieces[1:4] == ["<", "think", ">"]
        if text[-1] == 0:
            break
    said, thinks = "".join(pieces[i] for i in text if i), text[:3] == [1, 2, 3]  # the mark's own tokens
    _, closed, _ = said.removeprefix("<think>").partition("</think>")
    assert not thinks or budget is None or closed or len(text) <= budget + 6
    assert thinks or np.all(made().allowed(text)) or "<think>".startswith(said)


class Long(Constraint):
    """A constraint whose texts take at least five tokens."""

    n_least = 5

    def begin(self, n_tokens: int) -> None:
        """Refuse fewer."""
        if n_tokens < self.n_least:
            raise RequestError(f"{n_tokens} tokens are too few")


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("n_tokens", range(4, 16))
def test_the_answer_has_the_tokens_that_it_needs(n_tokens: int, opened: bool) -> None:
    """Endless thoughts end in time; where there is no room for both, that is said before the first token."""
    thoughts = replace(THINK, opened=opened)
    made = ThinkingConstraint(Long(Ones(len(PIECES))), thoughts, ThinkingVocabulary(Pieces(PIECES), thoughts))  # type: ignore[arg-type]
    if n_tokens < Long.n_least + opened:
        with pytest.raises(RequestError, match="too few"):
            made.begin(n_tokens)
        return
    made.begin(n_tokens)
    for _ in range(n_tokens):
        allowed = [PIECES[i] for i in np.flatnonzero(made.allowed())]
        made.commit(PIECES.index(next(piece for piece in ("<think>", "a", " ", "1", *allowed) if piece in allowed)))
    assert made.is_over


def test_a_family_of_channels_is_bound_from_its_first_token() -> None:
    """Either what is thought comes first or the channel of the answer; behind thoughts the answer's mark is written."""
    pieces = ("<end>", "<|c|>", "analysis", "final", "<|m|>", "<|e|>", "a", "1")
    vocabulary = ThinkingVocabulary(Pieces(pieces), HARMONY)  # type: ignore[arg-type]
    made = ThinkingConstraint(Constraint(Anything(len(pieces))), HARMONY, vocabulary)
    for text, following in (((), "<|c|>"), ((1,), "analysis final"), ((1, 3), "<|m|>"), ((1, 2, 4, 6, 5), "<|c|>")):
        assert " ".join(pieces[i] for i in np.flatnonzero(made.allowed(text))) == following
    assert made.allowed((1, 3, 4)).all()
    for token_id in (1, 2, 4, 6, 5):
        made.commit(token_id)
    assert made.forced() == (1, 3, 4)


def test_which_chats_think() -> None:
    """By the template's mark, and by how the prompt ends."""
    assert thoughts_of("{{ x }}", "a") is None
    assert thoughts_of(TEMPLATE, "a<think>\n\n</think>\n\n") is None
    found = [thoughts_of(TEMPLATE, prompt, 7) for prompt in ("a", "a<think>\n")]
    assert [(each.opened, each.budget) for each in found if each] == [(False, 7), (True, 7)]
    harmony = thoughts_of("{# <|channel|>analysis #}", "<|start|>assistant")
    assert harmony is not None
    assert harmony.alone == "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def engines() -> "list[edgedec.Engine]":
    """The 135M with a template that thinks, without drafts and with them."""
    path: Path = real_model("smollm2-135m.gguf")
    return [
        edgedec.load(path, n_ctx=1024, chat_template=TEMPLATE, draft=draft, offline=True) for draft in ("off", "auto")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("think", [None, True, 0, 1, 9, False])
def test_a_schema_behind_thoughts(
    engines: "list[edgedec.Engine]", think: bool | int | None, temperature: float
) -> None:
    """The answer is JSON of the schema, the budget holds, and drafts change nothing."""
    options = {"json_schema": SCHEMA, "think": think, "max_tokens": 160, "temperature": temperature, "seed": 3}
    plain, drafted = (engine.chat("Name a city, then say it as JSON.", **options) for engine in engines)  # type: ignore[arg-type]
    assert plain.token_ids == drafted.token_ids
    thought, closed, answer = plain.text.rpartition("</think>")
    if think in (None, True) and not closed:  # so small a model may think for ever
        assert (plain.finish_reason, plain.is_whole) == ("length", False)
        return
    assert plain.is_whole
    assert json.loads(answer).keys() == {"city", "n"}
    n_thought = len(engines[0].tokenizer.encode(thought.rstrip("\n"), add_special=False))
    assert think is True or n_thought <= (think or 0)


@pytest.mark.slow
def test_thoughts_leave_room_for_the_answer(engines: "list[edgedec.Engine]") -> None:
    """json_close ends thoughts in time; several texts think on their own; a cut in the thoughts says so."""
    for engine in engines:
        closed = engine.chat("Think long.", json_schema=SCHEMA, think=True, json_close=True, max_tokens=60, seed=1)
        assert json.loads(closed.text.rpartition("</think>")[2]).keys() == {"city", "n"}
        texts = engine.samples([{"role": "user", "content": "A city?"}], 3, json_schema=SCHEMA, think=5, max_tokens=90)
        assert all(json.loads(text.text.rpartition("</think>")[2]) for text in texts if text.is_whole)
        cut = engine.chat("Think long.", json_schema=SCHEMA, think=True, max_tokens=4, seed=1)
        assert not cut.is_whole
        assert any("cut in its thoughts" in reason for reason in (*cut.stats.reasons, *cut.stats.notes))
    one, other = (engine.chat("Hi.", think=3, max_tokens=20, seed=2) for engine in engines)
    assert one.text == other.text
    assert "</think>" in one.text


@pytest.mark.slow
def test_a_kept_prompt_thinks_and_answers_the_same(engines: "list[edgedec.Engine]") -> None:
    """A prompt of which the KV cache holds the most gives the text of the first time."""
    for engine in engines:
        chat = [{"role": "user", "content": "Name a city, then say it as JSON. " * 12}]
        options = {
            "json_schema": SCHEMA,
            "think": 6,
            "max_tokens": 120,
            "seed": 8,
            "temperature": 0.8,
            "reuse": "exact",
        }
        first, again = (engine.chat(chat, **options) for _ in range(2))  # type: ignore[arg-type]
        assert again.token_ids == first.token_ids
        assert again.stats.n_reused_tokens > 64


@pytest.mark.slow
def test_wrong_budgets(engines: "list[edgedec.Engine]") -> None:
    """A negative number is none, and a model that never thinks has no budget."""
    with pytest.raises(OptionError, match="think"):
        engines[0].chat("Hi.", think=-1)
    plain = edgedec.load(real_model("smollm2-135m.gguf"), n_ctx=64, draft="off", offline=True)
    with plain, pytest.raises(RequestError, match="never thinks"):
        plain.chat("Hi.", think=5)
