"""A real model and vocabulary: valid answers to every schema, and one text whatever is drafted."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.models.real_models import real_model
from support.texts.schemas import CASES, closed

import edgedec
from edgedec.grammar import Grammar
from edgedec.sequence import Generation

pytestmark = [pytest.mark.slow, pytest.mark.model]

PROMPT = "An example of a JSON value:\n"
PERSON = closed(
    {
        "name": {"type": "string", "maxLength": 20},
        "city": {"enum": ["Paris", "London", "Rome"]},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    *("name", "city", "languages"),
)
# A small model goes deeper and deeper into the recursive one.
ALL = {name: Grammar.json_schema(case.schema) for name, case in CASES.items() if name != "recursive"} | {
    "person": Grammar.json_schema(PERSON),
    "regex": Grammar.regex(r"The (capital|largest city) of [A-Z][a-z]{2,8} is [A-Z][a-z]{2,8}\."),
}
SEEDED = ("person", "union", "regex", "string")


def answers(draft: str) -> dict[str, Generation]:
    """Return the answers to every schema, greedy ones and some drawn."""
    found: dict[str, Generation] = {}
    model = real_model("smollm2-135m.gguf")
    with edgedec.load(model, draft=draft, runtime="cpu", n_ctx=512, offline=True) as engine:
        for name, grammar in ALL.items():
            found[name] = engine.generate(PROMPT, grammar=grammar, temperature=0, max_tokens=80)
        for name in SEEDED:
            way: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "max_tokens": 80}
            found[f"{name}, drawn"] = engine.generate(PROMPT, grammar=ALL[name], **way)
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Generation]:
    """The answers without drafts."""
    return answers("off")


def test_every_answer_is_valid(plain: dict[str, Generation]) -> None:
    """JSON that ends by itself and is valid under its schema."""
    for name, generation in plain.items():
        assert generation.finish_reason == "stop", name
        if name in CASES:
            assert CASES[name].is_valid(json.loads(generation.text)), generation.text
    person = json.loads(plain["person"].text)
    assert list(person) == ["name", "city", "languages"]
    assert person["city"] in ("Paris", "London", "Rome")


def test_drafts_change_no_answer(plain: dict[str, Generation]) -> None:
    """The tokens are plain decoding's; the forced ones, which were drafted, are the encoder's own for the whole."""
    drafted = answers("suffix+common")
    for name, generation in drafted.items():
        assert generation.token_ids == plain[name].token_ids, name
        assert generation.text == plain[name].text
    assert drafted["person"].stats.drafters["forced"]["right"] > 5


def test_forced_text_is_tokenized_as_the_model_knows_it(smollm_path: Path) -> None:
    """Where all is forced, the tokens are those that the model's tokenizer has for the text."""
    constant = {"first name": "Ada", "numbers": [1, 22, 333], "nothing": None}
    with edgedec.load(smollm_path, runtime="cpu", n_ctx=128, draft="suffix", offline=True) as engine:
        generation = engine.generate("x", json_schema={"const": constant}, max_tokens=60)
        assert generation.text == json.dumps(constant)
        assert list(generation.token_ids) == engine.tokenizer.encode(generation.text, add_special=False)
