"""Rows of files, and one question asked of each: the answers are those of the rows alone, whatever runs beside them."""

from pathlib import Path
from typing import Any

import pytest

import edgedec
from edgedec.errors import CancelledError, PromptTooLongError, RequestError
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec_apps.mapping import map_prompts, prompts_of

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


def test_places_are_filled_and_what_is_missing_is_the_rows_own_error() -> None:
    """A text stands as it is, another value as JSON; braces that name nothing stay. A bad row spoils no other."""
    assert prompts_of("{text}!", "a\r\n\n b {x}\n", is_json=False) == {1: "a!", 3: " b {x}!"}
    row = '{"text": "{b}", "b": [1, "é"], "first name": null}'
    assert prompts_of('{text}{b} {first name} {"a": {1}}', row, is_json=True) == {1: '{b}[1, "é"] null {"a": {1}}'}
    prompts = prompts_of("{text}", '7\n"x"\n\n{"a"\n{"b": 1, "c": 2}\n{}', is_json=True)
    assert [(number, str(prompt).split("(")[0]) for number, prompt in prompts.items()] == [
        (1, "the row is a JSON int; write an object or a text"),
        (2, "x"),
        (4, "the row is no JSON "),
        (5, "the row has no 'text'; it has 'b', 'c'"),
        (6, "the row has no 'text'; it has nothing"),
    ]


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

        mapped = map_prompts(engine, prompts(), cancel=cancel, **options)
        answers = [next(mapped) for _ in range(3)]
        cancel.cancel()
        with pytest.raises(CancelledError):
            answers += mapped
        reasons = {answer.finish_reason for answer in answers if isinstance(answer, Generation)}
        assert (reasons, len(answers) < 40) == ({"length"}, True)
        assert len(asked) < 60
        assert engine.pool.n_held == 0
