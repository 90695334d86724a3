"""Rows of files, and one question asked of each: the answers are those of the rows alone, whatever runs beside them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import edgedec
from edgedec.errors import PromptTooLongError, RequestError
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec_apps.mapping import Row, filled, map_prompts, read_rows, tried

ASK = (
    "Say of this ticket of a customer whether it is urgent, and in few words what it is about. It is urgent where "
    "somebody loses money, cannot work any more, or asks for help at once, but not where it can wait. The ticket: "
)
TICKETS = [
    f"{what} since {n} days. {end}"
    for n, what in enumerate(("The invoice is wrong", "My parcel is late"), 2)
    for end in ("Help at once.", "No hurry.", "What now?")
]
SCHEMA = {
    "type": "object",
    "properties": {"urgent": {"type": "boolean"}, "about": {"type": "string", "maxLength": 24}},
    "required": ["urgent", "about"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("content", "ending", "expected"),
    [
        ("a\r\n\n b {x}\n", ".txt", [Row(1, {"text": "a"}), Row(3, {"text": " b {x}"})]),
        ('{"a": 1}\n\n"b"\n', ".jsonl", [Row(1, {"a": 1}), Row(3, {"text": "b"})]),
        ('[{"a": [1]}, "b"]', ".json", [Row(1, {"a": [1]}), Row(2, {"text": "b"})]),
        ('a,b c\n"1,\n2",x\n3\n', ".csv", [Row(1, {"a": "1,\n2", "b c": "x"}), Row(2, {"a": "3", "b c": ""})]),
    ],
)
def test_rows_of_files(content: str, ending: str, expected: Sequence[Row]) -> None:
    """Lines, JSON lines, an array and a table; a row is numbered by its line, or by its place."""
    assert read_rows(content, ending) == expected


def test_places_are_filled_and_what_is_missing_is_the_rows_own_error() -> None:
    """A text stands as it is, another value as JSON; braces that name nothing stay. A bad row spoils no other."""
    row = Row(1, {"text": "{b}", "b": [1, "é"], "first name": None})
    assert filled('{text}{b} {first name} {"a": {1}}', row) == '{b}[1, "é"] null {"a": {1}}'
    with pytest.raises(RequestError, match="the row has no 'c'; it has 'text', 'b', 'first name'"):
        filled("{c}", row)
    rows = read_rows('7\n{"a"\n{"text": "x"}', ".jsonl")
    first, second, third = (tried("{text}", row) for row in rows)
    assert str(first) == "the row is a JSON int; write an object or a text"
    assert str(second).startswith("the row is no JSON (Expecting ':' delimiter")
    assert third == "x"
    for content, ending in (("{}", ".json"), ("[", ".json"), ('"a\n', ".csv")):
        with pytest.raises(RequestError, match="the file is no"):
            read_rows(content, ending)


@pytest.mark.model
@pytest.mark.slow
def test_each_answer_is_that_of_the_row_alone(smollm_path: Path) -> None:
    """Drawn, under a schema: == chat() of one after another, for 1, 3 and 8 at a time, plain and with drafts."""
    options: dict[str, Any] = {"json_schema": SCHEMA, "seed": 3, "temperature": 0.8}
    load: dict[str, Any] = {"runtime": "cpu", "n_ctx": 512, "grammars": True}
    prompts = [ASK + ticket for ticket in TICKETS]
    with edgedec.load(smollm_path, draft="off", **load) as engine:
        expected = [engine.chat(prompt, **options).text for prompt in prompts]
    assert len(set(expected)) > 3
    for n_parallel, draft in ((1, "auto"), (3, "off"), (8, "auto"), (8, "suffix+recycling")):
        with edgedec.load(smollm_path, draft=draft, n_parallel=n_parallel, **load) as engine:
            found = [answer for answer in map_prompts(engine, prompts, **options) if isinstance(answer, Generation)]
        assert [answer.text for answer in found] == expected
        n_common = found[0].stats.n_prompt_tokens - 40  # a ticket and the template's end have fewer tokens
        assert sum(answer.stats.n_reused_tokens == 0 for answer in found) == 1  # the one that read for all
        assert all(answer.stats.n_reused_tokens > n_common for answer in found if answer.stats.n_reused_tokens)


@pytest.mark.slow
def test_errors_are_of_rows_and_cancelling_leaves_whole_answers(tiny_path: Path) -> None:
    """A prompt that is too long and one that there is none of; then the rows behind the third are not asked."""
    asked, cancel = [], CancelToken()
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_end": True}
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, n_parallel=2) as engine:
        missing = RequestError("nothing")
        before = [
            engine.chat([{"role": "system", "content": "s"}, {"role": "user", "content": each}], **options).text
            for each in "abc"
        ]
        found = list(map_prompts(engine, ["a", "b" * 900, missing, "b", "c"], system="s", **options))
        assert [answer.text for answer in found if isinstance(answer, Generation)] == before
        assert isinstance(found[1], PromptTooLongError)
        assert found[2] is missing

        def prompts() -> Any:
            for number in range(1000):
                asked.append(number)
                yield str(number)

        answers = []
        for answer in map_prompts(engine, prompts(), cancel=cancel, **options):
            assert isinstance(answer, Generation)
            answers.append(answer.finish_reason)
            if len(answers) == 3:
                cancel.cancel()
        assert set(answers) == {"length"}
        assert 3 <= len(answers) < 40
        assert len(asked) < 60
        assert engine.pool.n_held == 0
