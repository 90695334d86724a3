"""edgedec run --method NAME of searches and of ways to choose: which text is printed, why, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from math import exp
from pathlib import Path

import pytest
from support.processes.command_line import run_here

import edgedec
from edgedec.plugins import CHOOSERS, SEARCHES, load_plugin, plugins
from edgedec_apps.choices import choose
from edgedec_apps.cli import completion
from edgedec_apps.cli.methods import names
from edgedec_apps.reward import reward_scorer

WARM = ("-t", "1", "-n", "8", "--method=ignore-end", "--draft", "off", "--runtime", "cpu", "--seed", "5")
LONG_IS_GOOD = (
    "import json, sys; texts = json.load(sys.stdin)['steps']; print([min(1, len(t.encode()) / 99) for t in texts])"
)


def scorer(code: str) -> str:
    """Return the command of a scorer in Python, as it is typed."""
    return f'{sys.executable} -c "{code}"'


@pytest.mark.slow
def test_the_chosen_text_is_printed_and_the_reason_said(model: Path) -> None:
    """Standard output has the chosen text alone; --explain shows the others on standard error; JSON has all."""
    several = json.loads(run_here("run", model, "Hello", *WARM, "-k", "4", "--json").out)["texts"]
    found = run_here("run", model, "Hello", *WARM, "-k", "4", "--method", "likely", "--explain")
    best = max(range(4), key=lambda k: several[k]["logprob_sum"] / len(several[k]["token_ids"]))
    assert (found.code, found.text) == (0, several[best]["text"] + "\n")
    assert f"chosen: text {best + 1} of 4: its mean log-probability of a token" in found.err
    assert found.err.count("(length), ") == 4
    document = json.loads(run_here("run", model, "Hello", *WARM, "-k", "4", "--method", "likely", "--json").out)
    assert (document["choice"]["place"], document["token_ids"]) == (best, several[best]["token_ids"])
    assert [text["token_ids"] for text in document["texts"]] == [text["token_ids"] for text in several]


@pytest.mark.slow
def test_the_most_probable_choice_is_printed(model: Path) -> None:
    """Standard output has it alone, standard error the first probabilities or all, and JSON all figures."""
    texts = ["b", "a, b", "c", "dd", "e", "f"]
    with edgedec.load(model, runtime="reference", draft="off") as engine:
        weighed = choose(engine, [{"role": "user", "content": "Hello"}], texts)
    lines = [f"  {choice.probability:.4f}  {choice.text}" for choice in weighed.ranked]
    for more, n_shown in (((), 5), (("--explain",), 6), (("--quiet",), 0)):
        found = run_here("run", model, "Hello", "--choices", json.dumps(texts), *more)
        assert (found.code, found.text) == (0, weighed.ranked[0].text + "\n")
        assert [line for line in found.err.splitlines() if line.startswith("  ")] == lines[:n_shown]
    assert run_here("run", model, "Hello", "--choices", "b, dd", "-q").text in ("b\n", "dd\n")
    document = json.loads(run_here("run", model, "Hello", "--choices", json.dumps(texts), "--json").out)
    assert (document["text"], document["mass"]) == (weighed.ranked[0].text, weighed.mass)
    assert document["choices"] == [asdict(choice) | {"token_ids": list(choice.token_ids)} for choice in weighed.choices]


def test_what_choices_exclude_is_refused(model: Path) -> None:
    """Before the model is loaded."""
    refused = (
        'a,a;a,;[1];["a";a,b -k 2;a,b --grammar regex:a;a,b --think on;a,b --method beam:n=2;a --method ignore-end'
    )
    for words in refused.split(";"):
        found = run_here("run", model, "Hello", "--choices", *words.split(" "))
        assert found.err.startswith("edgedec: --choices excludes" if " " in words else "edgedec: --choices is "), words


@pytest.mark.slow
def test_votes_and_scores(model: Path) -> None:
    """A vote counts what its answer matches; a scorer is a command that no shell reads; auto writes rounds of four."""
    for k, n in (("3", {3}), ("auto", {4, 8, 12, 16, 20, 24, 28, 32})):
        args = ("-k", k, "--method", "vote:answer=(?s).", "--json")
        document = json.loads(run_here("run", model, "Hello", *WARM, *args).out)
        assert len(document["texts"]) in n
        answers = [answer for answer in document["choice"]["answers"] if answer is not None]
        assert answers.count(document["choice"]["answers"][document["choice"]["place"]]) == max(
            map(answers.count, answers)
        )
    args = ("-k", "3", "--method", f"score:scorer={scorer(LONG_IS_GOOD)}", "--json")
    document = json.loads(run_here("run", model, "Hello", *WARM, *args).out)
    scores = [min(1, len(text["text"].encode("utf-8")) / 99) for text in document["texts"]]
    assert document["choice"]["scores"] == pytest.approx(scores)
    assert document["choice"]["place"] == scores.index(max(scores))


@pytest.mark.slow
def test_scorers_by_name(model: Path) -> None:
    """The likelihood of a text; and a reward model, loaded beside the model, of a search and of whole texts."""
    args = ("--method", "particles:2,scorer=likely", "--json")
    document = json.loads(run_here("run", model, "Hello", *WARM, *args).out)
    means = [text["logprob_sum"] / len(text["token_ids"]) for text in document["texts"]]
    assert document["choice"]["scores"] == pytest.approx([exp(mean) for mean in means])
    with edgedec.load(model, runtime="cpu", draft="off") as engine:
        reward = reward_scorer(engine)
        for way in (("--method", "particles:2,scorer="), ("-k", "2", "--method", "score:scorer=")):
            args = (*way[:-1], f"{way[-1]}model:{model}", "--json")
            document = json.loads(run_here("run", model, "Hello", *WARM, *args).out)
            assert document["choice"]["scores"] == pytest.approx(
                list(reward("Hello", [text["text"] for text in document["texts"]])), abs=1e-5
            )


@pytest.mark.slow
@pytest.mark.parametrize("search", plugins(SEARCHES))
def test_every_search_is_a_way_to_run(model: Path, search: str) -> None:
    """Each prints one text; one beam is greedy decoding."""
    args = ("-n", "6", "--method=ignore-end", "--draft", "off", "--runtime", "cpu")
    more = f",scorer={scorer(LONG_IS_GOOD)}" if load_plugin(SEARCHES, search).scored != "no" else ""
    found = run_here("run", model, "Hello", *args, "--method", f"{search}:2{more}", "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    assert len(document["token_ids"]) == 6
    assert "forwards of the search" in found.err
    if search == "beam":
        one = json.loads(run_here("run", model, "Hello", *args, "--method", "beam:1", "--json").out)
        greedy = json.loads(run_here("run", model, "Hello", *args, "-t", "0", "--json").out)
        assert one["token_ids"] == greedy["token_ids"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--method", "vote"), "--method vote needs several texts"),
        (("--method", "best", "-k", "2"), "--method 'best' is no method"),
        (("--method", "vote", "-k", "0"), "it must be from 1 to 256"),
        (("--method", "vote", "-k", "1000000"), "it must be from 1 to 256"),
        (("--method", "vote", "-k", "1e9"), "--texts is '1e9'"),
        (("--method", "vote:answer=(", "-k", "2"), "--method vote:answer is '('"),
        (("--method", "score", "-k", "2"), "--method score:scorer is missing;"),
        (("--method", "vote:scorer=true", "-k", "2"), "only with that"),
        (("--method", "likely", "-k", "auto"), "--texts is 'auto'; 'auto' counts the texts that agree"),
        (("-k", "auto"), "--texts auto needs a way to choose"),
        (("--method", "score:scorer='", "-k", "2"), "its quotes must close"),
        (("--method", "score:scorer=", "-k", "2"), "it must name a program"),
        (("--method", "planned:scorer=no-such-program"), "there is no program 'no-such-program'"),
        (("--method", "score:scorer=likely", "-k", "2"), "it scores the steps of a search"),
        (("--method", "particles:scorer=likely:first"), "--method particles:scorer is 'likely:first'"),
        (("--method", "particles:scorer=probe:nowhere"), "step_scorers.py"),
        (("--method", "beam", "-k", "2"), "exclude each other"),
        (("--method", "beam", "--method", "vote"), "--method beam and --method vote exclude each other"),
        (("--method", "beam:0"), "--method beam:n is 0; it must be a whole number from 1 to 64"),
        (("--method", "beam:1000000"), "from 1 to 64"),
        *((("--method", f"beam:{size}"), "beam:n is ") for size in ("x", "-1", "1.5", "\u0663", "1:2", "9" * 5000)),
        (("--method", "beam:size=4"), "--method beam has no key 'size'; it has n=N, scorer=TEXT"),
        (("--method", "beam:scorer=true"), "takes none"),
        (("--method", "planned"), "needs one"),
        (("--method", "beam", "-t", "0.5"), "takes the most probable tokens"),
        (("--method", "particles", "--grammar", "regex:a+"), "can't heed it"),
        (("--method", "cntp", "--method", "stop-unsure:0.5"), "can't heed it"),
        (("--method", "refine:n=2"), "--method refine needs check=TEXT"),
        (("--method", "refine:true,n=0"), "--method refine:n is 0; it must be a whole number from 1 to 256"),
        (("--method", "refine:true", "--method", "vote"), "--method refine and --method vote exclude each other"),
        (("--method", "refine:true", "-k", "auto"), "the most texts in all"),
        (("--method", "refine:true,seconds=0"), "--method refine:seconds is 0.0; it must be above 0"),
        (("--method", "refine:true,tokens=0"), "--method refine:tokens is 0"),
        (("--method", "refine:true", "--raw"), "--method refine needs the chat template"),
        (("--method", "refine:."), "'.' is a folder"),
    ],
)
def test_what_is_refused(model: Path, args: tuple[str, ...], words: str) -> None:
    """The message names the option that was typed."""
    run_here("run", model, "Hello", "-n", "4", "--runtime", "cpu", "-q", *args).failed(40, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("print('rubbish')", "must print a JSON array"),
        ("print([0.5])", "2 numbers from 0 to 1"),
        ("print('[0.5, NaN]')", "2 numbers from 0 to 1"),
        ("import time; time.sleep(60)", "took longer than 0.3 s"),
        ("while True: print('x' * 999)", "printed more than 1048576 bytes"),
    ],
)
def test_a_scorer_that_fails_costs_no_text(model: Path, code: str, words: str) -> None:
    """The error says what was wrong, and the texts that were written are printed all the same."""
    seconds = "0.3" if "sleep" in code else "20"
    args = ("-k", "2", "--method", f"score:scorer-seconds={seconds},scorer={scorer(code)}")
    found = run_here("run", model, "Hello", *WARM, *args)
    assert found.code == 32
    assert words in found.err.splitlines()[-1]
    several = run_here("run", model, "Hello", *WARM, "-k", "2")
    assert found.out == several.out


@pytest.mark.slow
def test_a_refined_text_with_what_was_said_of_each(model: Path) -> None:
    """Every attempt and verdict is shown, and in JSON; exit code 46 says that none passed, and the best is printed."""
    short = (
        "import json, sys; n = len(json.load(sys.stdin)['steps'][0]); "
        "print([1 if n < LIMIT else 0.5 if n < 7 else 0]); "
        "print(n, 'characters', file=sys.stderr)"
    )
    args = ("-k", "4", "--method", f"refine:n=2,check={scorer(short.replace('LIMIT', '1'))}")
    found = run_here("run", model, "Hello", *WARM, *args)
    assert found.code == 46
    assert "none of 4 texts passed the check" in found.err.splitlines()[-1]
    assert found.err.count("characters") == 4
    assert "text 1: round 0, score " in found.err
    assert "text 4: round 2, revised, score " in found.err
    document = json.loads(run_here("run", model, "Hello", *WARM, *args, "--json").out)
    choice, texts = document["choice"], document["texts"]
    assert found.text == document["text"] + "\n"
    assert [verdict["words"] for verdict in choice["verdicts"]] == [f"{len(text['text'])} characters" for text in texts]
    assert (choice["rounds"], choice["passed"]) == ([0, 1, 1, 2], False)
    assert choice["revised"] == [False, False, False, True]
    assert choice["place"] == choice["scores"].index(max(choice["scores"]))
    passed = run_here("run", model, "Hello", *WARM, *args[:-1], args[-1].replace("< 1 ", "< 999 "), "--explain")
    assert passed.code == 0
    assert "chosen: text 1 of 1: it passed the check" in passed.err
    assert "round 0, score 1.000" in passed.err


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals as POSIX has them")
@pytest.mark.parametrize("way", [("-k", "2", "--method", "score:scorer="), ("--method", "refine:n=2,check=")])
def test_ctrl_c_ends_the_scorer_too(model: Path, tmp_path: Path, way: tuple[str, ...]) -> None:
    """While a command scores texts, Ctrl-C ends it and prints a text; nothing that was started goes on."""
    note = tmp_path / "pid"
    code = f"import os, time; open('{note}', 'w').write(str(os.getpid())); time.sleep(60)"
    args = (*way[:-1], way[-1] + scorer(code))
    command = [sys.executable, "-m", "edgedec_apps.cli", "run", str(model), "Hello", *WARM, *args]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        ends = time.monotonic() + 60
        while not (note.exists() and note.read_text()) and time.monotonic() < ends:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out.strip()
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_the_completion_knows_every_method() -> None:
    """The words that Tab offers are methods that exist, and all of them."""
    words = {word.partition(":")[0] for word in completion.method("")}
    assert words == set(names())
    assert {*plugins(SEARCHES), *plugins(CHOOSERS)} <= words
