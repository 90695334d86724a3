"""The figures of a benchmark, its report, the machine's, and the prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import edgedec
from edgedec.errors import PromptTooLongError, RequestError, StorageError
from edgedec_apps.bench.measure import AGAIN, PLAIN, SPECULATIVE, Run, Trial
from edgedec_apps.bench.prompts import BenchPrompt, BenchRequest, prepare, read_prompts
from edgedec_apps.bench.summary import differing, figures, noise, summarize, worst_prompt
from edgedec_apps.bench.table import columns, lines

WAYS = (SPECULATIVE, PLAIN, AGAIN)
TASKS = ["chat", "code_edit", "math_reasoning", "summarization", "translation"]


def request(name: str, task: str = "chat") -> BenchRequest:
    return BenchRequest(name, task, (1,), 7)


def run_of(n_tokens: int, decode_s: float, *, first: int = 0, n_steps: int = 0, n_accepted: int = 0) -> Run:
    """Return a run whose first token took a second; `first` is its first token."""
    return Run((first, *range(1, n_tokens)), 1.0, 1.0 + decode_s, n_steps, n_accepted)


def trial(name: str, times: Sequence[float], *, task: str = "chat", round_: int = 0, n_tokens: int = 9) -> Trial:
    """Return a trial in which the three ways took these seconds after the first token."""
    runs = [run_of(n_tokens, seconds) for seconds in times]
    return Trial(request(name, task), round_, dict(zip(WAYS, runs, strict=True)))


# What the figures are


def test_times_are_medians_over_rounds_and_sums_over_prompts() -> None:
    """8 tokens each after the first: (1 + 2) s with drafts, (2 + 4) s plain; outliers of a round don't count."""
    trials = [
        *(trial("a", (s, p, 1.0), round_=n) for n, (s, p) in enumerate([(1.0, 2.0), (50.0, 2.0), (0.5, 90.0)])),
        *(trial("b", (s, p, 1.0), round_=n) for n, (s, p) in enumerate([(2.0, 4.0), (1.0, 3.0), (9.0, 5.0)])),
    ]
    found = figures(trials)
    assert (found["tok_s"], found["plain_tok_s"], found["speedup"]) == (16 / 3, 16 / 6, 2.0)
    assert found["request_speedup"] == 8 / 5
    assert (found["first_token_s"], found["plain_first_token_s"]) == (1.0, 1.0)
    assert (found["n_prompts"], found["n_rounds"]) == (2, 3)


def test_accepted_per_step_counts_all_steps() -> None:
    """3 of 4 steps' drafts accepted 6 tokens, and 1 of 4 none: 6 accepted in 8 steps."""
    runs = {SPECULATIVE: run_of(9, 1.0, n_steps=4, n_accepted=6), PLAIN: run_of(9, 2.0, n_steps=8), AGAIN: run_of(9, 2)}
    off = {SPECULATIVE: run_of(9, 1.0, n_steps=4), PLAIN: run_of(9, 2.0, n_steps=8), AGAIN: run_of(9, 2.0)}
    assert figures([Trial(request("a"), 0, runs), Trial(request("b"), 0, off)])["accepted_per_step"] == 0.75


def test_one_other_token_is_told() -> None:
    """A single speculative run that differs makes its task, and all, not identical, and names the prompt."""
    same, other = trial("a", (1.0, 2.0, 2.0)), trial("b", (1.0, 2.0, 2.0), task="qa", round_=1)
    other = Trial(other.request, 1, {**other.runs, SPECULATIVE: run_of(9, 1.0, first=3)})
    found = summarize([same, trial("b", (1.0, 2.0, 2.0), task="qa"), other])
    assert [found["all"]["identical"], *(task["identical"] for task in found["tasks"].values())] == [False, True, False]
    assert found["differing_prompts"] == differing([same, other]) == ["b"]


def test_noise_is_plain_against_plain() -> None:
    """Over all prompts 8/8; by round of a task 2/1, 2/4 and 4/3: a spread of 1.5."""
    trials = [
        trial("a", (1.0, 2.0, 1.0)),
        trial("a", (1.0, 2.0, 4.0), round_=1),
        trial("b", (1.0, 4.0, 3.0), task="qa"),
    ]
    assert noise(trials) == {"ratio": 6 / 5.5, "spread": 1.5, "lowest": 0.5, "highest": 2.0}


def test_the_worst_prompt_has_more_than_one_token() -> None:
    """The least speedup of a prompt counts; a prompt of one token has no speed."""
    trials = [trial("a", (1.0, 2.0, 2.0)), trial("b", (2.0, 1.0, 1.0)), trial("c", (5.0, 1.0, 1.0), n_tokens=1)]
    assert worst_prompt(trials) == ("b", 0.5)


def test_answers_without_tokens_have_no_speed() -> None:
    """Prompts that end at once give None, not an error."""
    empty = Trial(request("a"), 0, dict.fromkeys(WAYS, Run((), 0.5, 0.5)))
    found = summarize([empty])
    assert (found["all"]["tok_s"], found["all"]["speedup"], found["all"]["identical"]) == (None, None, True)
    assert found["worst_prompt_speedup"] is None
    assert found["noise"] == {"ratio": None, "spread": None, "lowest": None, "highest": None}
    assert any(line.split()[:2] == ["chat", "-"] for line in lines(document_of([empty])))


def document_of(trials: Sequence[Trial], **others: Any) -> dict[str, Any]:
    """Return the JSON object of a benchmark around these trials."""
    head = {"model": "m.gguf", "runtime": "cpu", "draft": "auto", "threads": 2, "max_tokens": 9, "temperature": 0.0}
    head |= {"warm_store": False, "interrupted": False, "draft_numerics": "strict"}
    tail = {"against": {}, "curve": {1: 10.0, 2: 12.5}, "bandwidth_gb_s": 9.5, "peak_rss_bytes": 167_000_000}
    return head | summarize(trials) | tail | others


def test_the_report_can_be_read_off() -> None:
    """A benchmark of one prompt, line by line."""
    other = {"llamacpp": {"tok_s": 2.0, "lookup_tok_s": None, "lookup_reason": "no"}}
    found = lines(document_of([trial("a", (1.0, 2.0, 2.5))], against=other, warm_store=True))
    assert found == [
        "m.gguf · cpu · draft auto · 2 threads · greedy · at most 9 tokens · "
        "WARM STORES: drafters have learned from earlier runs",
        "",
        "task  tok/s  plain  speedup  same text  accepted/step  first token  rounds",
        "chat    8.0    4.0     2.00        yes              -       1.00 s       1",
        "all     8.0    4.0     2.00        yes              -       1.00 s       1",
        "",
        "plain against plain: 0.800, in a round of a task 0.80 to 0.80; a difference within that range is noise",
        "least speedup of a prompt: 2.00 (a)",
        "llamacpp: 2.0 tok/s; with its prompt lookup not measured: no",
        "a forward of n tokens in ms: T(1) 10.0, T(2) 12.5",
        "memory is read at 9.5 GB/s; the process held at most 167 MB",
    ]
    assert lines(document_of([], bandwidth_gb_s=None))[-1] == "the process held at most 167 MB"
    other_text = document_of([trial("a", (1.0, 2.0, 2.5))]) | {"differing_prompts": ["a", "b"]}
    assert lines(other_text)[-1] == "OTHER TEXT than plain decoding: a, b; please report this"
    assert lines(other_text | {"draft_numerics": "loose"})[-1].endswith("a, b; loose numerics allow this")
    assert columns([("a", "b"), ("cc", "ddd")]) == ["a     b", "cc  ddd"]


# The prompts


def test_our_own_prompts_are_four_of_each_task() -> None:
    """The set that ships has five tasks with four prompts each, and code to edit comes as a whole file."""
    found = read_prompts()
    assert [one.task for one in found] == [task for task in TASKS for _ in range(4)]
    assert len({one.text for one in found}) == 20
    for one in found:
        if one.task == "code_edit":
            assert 30 <= one.text.count("\n") - 2 <= 60
            compile(one.text.split("```python\n")[1].removesuffix("```"), one.id, "exec")


def test_the_first_prompts_of_every_task(tmp_path: Path) -> None:
    """--per-task takes the first ones of each task, wherever they stand; a BOM and empty lines don't count."""
    rows = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "x")]
    path = prompt_file(tmp_path, [{"id": i, "task": task, "turns": [i, "more"], "source": "?"} for i, task in rows])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n\n")
    assert [one.id for one in read_prompts(path)] == ["a", "c", "d", "b"]
    assert read_prompts(path, 1) == [BenchPrompt("a", "x", "a"), BenchPrompt("b", "y", "b")]


def prompt_file(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


GOOD = '{"id": "a", "task": "x", "turns": ["Hello"]}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("7", "JSON object"),
        (GOOD, "used before"),
        ('{"task": "x", "turns": ["Hello"]}', '"id" is None'),
        ('{"id": "b", "task": 7, "turns": ["Hello"]}', '"task" is 7'),
        ('{"id": "b", "task": "x", "turns": []}', '"turns"'),
        ('{"id": "b", "task": "x", "turns": "Hello"}', '"turns"'),
        ('{"id": "b", "task": "x", "turns": ["  "]}', '"turns"'),
        ('{"id": "b", "task": "x", "turns": ["\\ud800"]}', "surrogate"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, words: str) -> None:
    """A prompts file is refused with the line's number and what is wrong with it."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(RequestError, match=words) as refused:
        read_prompts(path)
    assert f"{path}, line 3: " in str(refused.value)


def test_files_that_hold_no_prompts(tmp_path: Path) -> None:
    """An empty file, one that is not UTF-8, none at all and one of more bytes than a set takes are refused."""
    path = tmp_path / "prompts.jsonl"
    no_text = b"\xef\xbb\xbf" + GOOD.encode() + b"\n\xff\n"
    for data, words in ((b"\n", "holds no prompt"), (no_text, "is not UTF-8: byte .*, in line 2, is 0xff")):
        path.write_bytes(data)
        with pytest.raises(RequestError, match=words):
            read_prompts(path)
    with pytest.raises(StorageError, match="can't be read"):
        read_prompts(tmp_path / "missing")
    with path.open("r+b") as file:
        file.truncate(64_000_001)
    with pytest.raises(RequestError, match="holds more than 64000000 bytes"):
        read_prompts(path)


@pytest.mark.slow
def test_prompts_go_through_the_chat_template_where_there_is_one(model: Path, plain_model: Path) -> None:
    """With a template the tokens are those of a user's message, without one those of the text; seeds are fixed."""
    prompts = [BenchPrompt("a", "chat", "abc"), BenchPrompt("b", "chat", "abc")]
    with edgedec.load(model, runtime="reference") as engine:
        chat, other = prepare(engine, prompts, 16)
        assert chat.token_ids == tuple(engine.chat_ids([{"role": "user", "content": "abc"}]))
        assert (chat.seed, other.seed) == (0xE8B7BE43, 0x71BEEFF9)
        with pytest.raises(PromptTooLongError, match="the prompt a takes 24 tokens"):
            prepare(engine, prompts, 2025)
    with edgedec.load(plain_model, runtime="reference") as engine:
        assert prepare(engine, prompts[:1], 16)[0].token_ids == tuple(engine.tokenizer.encode("abc"))
