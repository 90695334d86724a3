"""Free text with marks: what stands behind a mark keeps to its grammar, whatever the tokens and the drafts are."""

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.pieces import Pieces
from support.models.real_models import real_model

import edgedec
from edgedec.constraint import Constraint
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec.mark_vocabulary import MarkVocabulary
from edgedec.tagged import TaggedState, Tags
from edgedec_apps.call_forms import KEYED
from edgedec_apps.call_grammar import bound_calls
from edgedec_apps.replies import split_reply
from edgedec_apps.reply_marks import call_form, marks_of
from edgedec_runtimes.grammar.compiler import json_in_lark

jsonschema = pytest.importorskip("jsonschema")
PIECES = ("<end>", "<", "call", ">", ">1", "> ", "a", "1", "2", "<call>", "a<call> ", "<call>1", "[", "[1")
BODY, START = Grammar.regex("1*2"), Grammar.regex("a1*2")
TAGGED = Grammar.tagged({"<call>": BODY, "[": BODY}, start=START, binds="a11")


class Ones:
    """The state of ones that a two ends, behind an `a` where that is the grammar."""

    predicate = None

    def __init__(self, grammar: Grammar) -> None:
        self.begins, self.taken = grammar == START, list[str]()

    @property
    def is_complete(self) -> bool:
        """Whether the two came."""
        return self.taken[-1:] == ["2"]

    may_end = is_complete

    def allowed(self) -> np.ndarray:
        """Return bool[n_vocab]."""
        following = ("a",) if self.begins and not self.taken else () if self.is_complete else ("1", "2")
        return np.array([piece in following for piece in PIECES])

    def forced(self) -> tuple[int, ...]:
        """Return nothing."""
        return ()

    def advance(self, token_id: int) -> bool:
        """Take a piece."""
        if not self.allowed()[token_id]:
            return False
        self.taken.append(PIECES[token_id])
        return True

    def back(self, n_tokens: int) -> None:
        """Take pieces back."""
        assert 0 <= n_tokens <= len(self.taken)
        del self.taken[len(self.taken) - n_tokens :]

    def close(self) -> None:
        """Do nothing."""


def tagged() -> Constraint:
    """Return the constraint of TAGGED."""
    vocabulary = MarkVocabulary(Pieces(PIECES), ["<call>", "["], "")  # type: ignore[arg-type]
    return Constraint(TaggedState(Tags.of(TAGGED), vocabulary, Ones))


@settings(max_examples=150)
@given(choices=st.lists(st.integers(0, 99), min_size=1, max_size=14))
def test_a_path_is_allowed_as_the_text_is(choices: list[int]) -> None:
    """What may follow a text and a path is what may follow the longer text; each mark is followed by its grammar."""
    whole, text = tagged(), list[int]()
    for choice in choices:
        allowed = whole.allowed(text)
        ids = np.flatnonzero(allowed)
        if not len(ids):
            assert PIECES[text[-1]] in ("<end>", "2")
            break
        text.append(int(ids[choice % len(ids)]))
        assert all(whole.allows(text[:-1], i) == allowed[i] for i in range(len(PIECES)))
        for cut in range(len(text)):
            behind = tagged()
            for token_id in text[:cut]:
                behind.commit(token_id)
            assert behind.allowed(text[cut:-1]).tolist() == allowed.tolist()
    said = "".join(PIECES[i] for i in text)
    bound = re.match("a11+", said)
    assert bound is None or re.fullmatch("a1+2?", said)
    marks = "" if bound else "<call>|\\["
    for mark in re.finditer(marks or "(?!)", said):
        assert re.match(" ?1*(2|$)", said[mark.end() :])
    for token_id in text:
        whole.commit(token_id)
    inside = re.search("(^a11+|(<call>|\\[) ?1*)$", said) is not None
    assert whole.may_end is not inside
    assert whole.is_complete is (said.endswith("<end>") or (bound is not None and said[-1] == "2"))


def test_what_is_no_tagged_grammar_is_refused() -> None:
    """Marks are texts, grammars are not tagged themselves, and the expression is one."""
    for wrong in ({}, {" ": BODY}, {"<call>": TAGGED}, {"<call>": "1"}):
        with pytest.raises(RequestError):
            Grammar.tagged(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="regular expression"):
        Grammar.tagged({"<call>": BODY}, binds="(")
    for source in ("[", "[1, null, null]", '[{}, null, "("]'):
        with pytest.raises(RequestError, match="marks"):
            Tags.of(Grammar("tagged", source))


def test_a_schema_within_a_grammar() -> None:
    """It keeps its keys that bind, in words that llguidance takes; one that it does not take binds no more."""
    said = '{"type": "object", "title": "x", "properties": {"title": {"const": 1, "description": "y"}}}'
    assert '"properties": {"title": {"const": 1}}' in json_in_lark(said)
    assert '"title": "x"' not in json_in_lark(said)
    assert "color" not in json_in_lark('{"type": "string", "format": "color"}')
    ahead = '{"type": "string", "pattern": "^(?!x)[a-z]$"}'
    assert json_in_lark(ahead) == json_in_lark('{"type": "object"}')


TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
MAIL = {
    "type": "object",
    "properties": {"to": {"type": "string", "pattern": "^[a-z]{1,9}$"}},
    "required": ["to"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("weather", WEATHER), ("weather_mail", MAIL))
]
BEGUN = ("<tool_call>", '```json\n{\n  "name": "weather"', '{"name": "weather"', '{{"name": "weather"', "The answer:")
CHAT = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def engines() -> "list[edgedec.Engine]":
    """The 135M with a template that calls tools, without drafts and with them."""
    path = real_model("smollm2-135m.gguf")
    return [
        edgedec.load(path, n_ctx=1024, chat_template=TEMPLATE, draft=draft, offline=True) for draft in ("off", "auto")
    ]


def call_of(text: str) -> dict[str, Any]:
    """Return the call that a text begins with, in a mark, a fence or alone."""
    bare = text.removeprefix("<tool_call>").removeprefix("```json").lstrip()
    bare = bare[1:-1] if bare.startswith("{{") else bare
    call = json.JSONDecoder().raw_decode(bare)[0]
    return {"arguments": call.get("parameters"), **call}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("begun", BEGUN)
def test_calls_keep_to_the_tools(engines: "list[edgedec.Engine]", begun: str, temperature: float) -> None:
    """A begun call is completed and valid, with drafts and without; other text is what it is without tools."""
    options: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 70}
    texts = []
    for engine in engines:
        prompt, ids = engine.chat_ids(CHAT, tools=TOOLS), engine.tokenizer.encode(begun, add_special=False)
        grammar = bound_calls(engine, TOOLS)
        bound = engine.generate(prompt, resume=ids, grammar=grammar, **options)
        texts.append(bound.token_ids)
        if begun.startswith("The"):
            free = engine.generate(prompt, resume=ids, **options)
            assert free.token_ids == bound.token_ids
            continue
        call = call_of(bound.text)
        assert call["name"] in ("weather", "weather_mail")
        jsonschema.validate(call["arguments"], WEATHER if call["name"] == "weather" else MAIL)
        if begun == "<tool_call>":
            cut = options | {"json_close": True, "max_tokens": 45}
            assert call_of(engine.generate(prompt, resume=ids, grammar=grammar, **cut).text)["arguments"]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_several_texts_call_each_for_itself(engines: "list[edgedec.Engine]") -> None:
    """Samples of one prompt that ends with the mark's beginning, with a schema for answers without calls."""
    for engine in engines:
        grammar = bound_calls(engine, TOOLS[:1], {"type": "integer"})
        assert grammar is not None
        prompt = engine.chat_ids(CHAT, tools=TOOLS[:1])
        for text in engine.samples(prompt, 4, grammar=grammar, max_tokens=120, seed=1, temperature=1.0):
            if text.text.startswith("<tool_call>"):
                jsonschema.validate(call_of(text.text)["arguments"], WEATHER)
            elif text.is_whole:
                assert isinstance(json.loads(text.text), int)


DATA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "n": {"$ref": "#/$defs/digit"},
        "city": {"type": "string"},
        "flag": {"type": ["boolean", "null"]},
    },
    "required": ["unit", "n", "city"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 1, "maximum": 9}},
}


@pytest.mark.slow
@pytest.mark.parametrize("sign", [*KEYED, "{}"])
def test_keys_and_values_keep_to_the_tools(sign: str) -> None:
    """Calls in XML have the keys that are needed, and values of their types; a tool without arguments has none."""
    tools = [{"type": "function", "function": {"name": "save", "parameters": DATA}}]
    tools += [{"type": "function", "function": {"name": "list"}}]
    template = re.sub("(?s){% for c.*?endfor %}", "", TEMPLATE) + "{# " + sign + " #}" if sign in KEYED else TEMPLATE
    with edgedec.load(
        real_model("smollm2-135m.gguf"), n_ctx=1024, chat_template=template, draft="off", offline=True
    ) as engine:
        form, grammar, seen = call_form(template, engine.tokenizer), bound_calls(engine, tools), set[str]()
        assert form is not None
        assert bool(form.keyed) is (sign in KEYED)
        ids = engine.tokenizer.encode(form.opens, add_special=False)
        for seed in range(6):
            text = engine.generate(
                engine.chat_ids(CHAT, tools=tools),
                resume=ids,
                grammar=grammar,
                max_tokens=150,
                seed=seed,
                temperature=1.0,
                logit_bias=dict.fromkeys(engine.tokenizer.encode("list save", add_special=False)[:seed], -9.0),
            )
            for call in split_reply(text.text, marks_of(template), tools={"save": DATA, "list": {}}).calls:
                seen.add(call.name)
                jsonschema.validate(json.loads(call.arguments), DATA if call.name == "save" else {"maxProperties": 0})
        assert "save" in seen
