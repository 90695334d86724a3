"""--method and --draft-option: what they take, what they refuse, the list of them, and options that went."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from support.processes.command_line import run_here

from edgedec.api.options import DraftOptions
from edgedec.load_options import N_DRAFT_MAX
from edgedec.plugins import CHOOSERS, DENOISING_RULES, DRAFTERS, SEARCHES, SESSIONS, TEXT_METHODS, plugins
from edgedec_apps.cli.app import app
from edgedec_apps.cli.draft_options import Drafting, drafting_of
from edgedec_apps.cli.method_keys import shown_keys, split_pairs
from edgedec_apps.cli.methods import about, asked_methods, lossy_of, method_named, names, text_options, values_of
from edgedec_apps.cli.opening import engine_options
from edgedec_apps.cli.options import LoadFlags
from edgedec_apps.cli.other_words import MOVED, moved
from edgedec_methods.switching import Switching


def test_the_list_has_every_method_and_drafter() -> None:
    """Each with whom it is for; a page of one has its keys; nothing else is printed."""
    listed = run_here("methods")
    assert (listed.code, listed.err) == (0, "")
    for group in (SESSIONS, TEXT_METHODS, CHOOSERS, SEARCHES, DRAFTERS, DENOISING_RULES):
        for name in plugins(group):
            typed = name if group == DENOISING_RULES else name.replace("_", "-")
            assert typed in listed.text or name in ("futures", "predicate"), name
    for name in names():
        method = method_named(name)
        what, gain, _ = about(method.doc)
        assert what, name
        assert gain, name
        keys = [] if method.keys is None or method.keys.__name__ == "Value" else shown_keys(method.keys)
        assert all(told for _, told in keys), name
    assert all(typed in listed.text for typed, _ in shown_keys(Drafting))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("beam", ("--method beam", "n=N", "scorer-seconds=X", "Beam search: of the texts of each length")),
        ("prompt_keep", ("--method prompt-keep", "keep=X", "model=NAME", "first token in 0.42 of the time")),
        ("suffix", ("--draft suffix",)),
        ("diffusion:threshold", ("--method diffusion:threshold", "2.13 tokens a forward")),
    ],
)
def test_one_of_them(name: str, words: tuple[str, ...]) -> None:
    """What it does, whom it is for, what was measured, how it is typed, and its keys with their defaults."""
    shown = run_here("methods", name)
    assert shown.code == 0
    assert [each for each in words if each not in shown.text] == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--method", "slyde"), "--method 'slyde' is no method; did you mean slide?"),
        (("--method", "zzz"), "'zzz' is no method; there are a-star, adadec,"),
        (("--method", "slide:3"), "--method slide takes no '3'"),
        (("--method", "switching:entrpy=1"), "no key 'entrpy'; did you mean entropy or"),
        (("--method", "switching:x,entropy=low"), "--method switching:entropy is 'low'; it must be a number"),
        (("--method", "layer-skip"), "--method layer-skip needs speedup=X"),
        (("--method", "layer-skip:1.1,force=perhaps"), "--method layer-skip:force is 'perhaps'; it must be yes or no"),
        (("--method", "predicate"), "--method predicate takes what can't be typed"),
        (("--draft-option", "max"), "--draft-option is 'max'; write KEY=VALUE, such as max=8"),
        (("--draft-option", "mx=8"), "--draft-option has no key 'mx'; did you mean max?"),
        (("--draft-option", "max=x"), "--draft-option max is 'x'; it must be a whole number"),
        (("--draft-option", "numerics=fast"), "--draft-option numerics is 'fast'; it must be strict, padded or loose"),
        (("--draft-option", "overlap=maybe"), "--draft-option overlap is 'maybe'; it must be yes or no"),
        (("--penalty", "repeat=1.1"), "write NAME=X with one of repetition, frequency, presence, last-n"),
    ],
)
def test_what_is_refused(model: Path, args: tuple[str, ...], words: str) -> None:
    """By its name, with what there is, before a model is loaded."""
    run_here("run", model, "hi", "-q", *args).failed(40, words)


@pytest.mark.parametrize("command", ["serve", "bench", "plan"])
def test_a_method_of_texts_is_for_run(model: Path, command: str) -> None:
    """The other commands say so; methods of loading are theirs, too."""
    run_here(command, model, "--method", "beam").failed(40, "--method beam has no effect here: edgedec run has it")


def test_nothing_is_lost_on_the_way() -> None:
    """Each key reaches the argument of edgedec.load, or the option of a text, that it stands for."""
    drafts = {"model": "small", "head": "off", "max": 7, "tree": "grow", "numerics": "loose", "store": "f"}
    given = [*(f"{name}={value}" for name, value in drafts.items()), "overlap=yes", "rule=block"]
    assert drafting_of(given) == Drafting(**drafts, rule="block", overlap=True)  # type: ignore[arg-type]
    methods = ["slide", "layer-skip:1.2,force=yes", "prompt_keep:0.5,model=m", "pictures:off,max_tokens=9"]
    flags = LoadFlags(method=methods, draft_option=given[:-1], gpu_layers="6GB")
    options = engine_options(flags)
    assert (options.draft_model, options.draft_head, options.n_draft_max) == ("small", "off", 7)
    assert options.drafting == DraftOptions(overlap=True, tree="grow", numerics="loose", store="f")
    assert (options.projector, options.image_max_tokens) == (None, 9)
    assert (options.gpu_memory, options.n_gpu_layers) == ("6GB", None)
    assert engine_options(LoadFlags(gpu_layers="-1")).n_gpu_layers == -1
    lossy = options.lossy
    assert (lossy.slide, lossy.layer_skip, lossy.layer_skip_force) == (True, 1.2, True)
    assert lossy.methods == {"prompt_keep": {"keep": 0.5, "model": "m"}}
    assert engine_options(LoadFlags()).n_draft_max == N_DRAFT_MAX
    texts = ["momentum:0.1", "ignore-end", "stop-unsure:0.5", "json-close", "min-tokens:3"]
    assert text_options(values_of(asked_methods(texts, "text"))) == {
        "momentum": 0.1,
        "ignore_end": True,
        "stop_unsure": 0.5,
        "json_close": True,
        "methods": {"min_tokens": 3},
    }
    assert lossy_of(values_of(asked_methods(["switching:a", "switching:entropy=1"], "load"))).methods == {
        "switching": {"small_model": "a", "entropy": 1.0}
    }


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        ("", []),
        ("4", [("", "4")]),
        ("n=4,answer=a,b", [("n", "4"), ("answer", "a,b")]),
        ("check='./c --x=1,n=2',n=3", [("check", "./c --x=1,n=2"), ("n", "3")]),
        ("threshold:0.9,window:64", [("", "threshold:0.9,window:64")]),
        ("a b,entropy-force=yes", [("", "a b"), ("entropy-force", "yes")]),
    ],
)
def test_pairs_are_split(words: str, pairs: list[tuple[str, str]]) -> None:
    """At a comma before another key; a value in quotes holds any comma."""
    assert split_pairs(words) == pairs


def test_a_guests_dataclass_declares_its_keys() -> None:
    """The fields, with what each takes and their lines of the docstring."""
    keys = shown_keys(Switching)
    assert [typed for typed, _ in keys] == ["small-model=NAME", "entropy=X", "entropy-force=yes or no"]
    assert keys[0][1].startswith("The smaller model, which writes where the text is easy")


@pytest.mark.parametrize("option", MOVED)
def test_what_an_option_that_went_becomes(option: str) -> None:
    """The error spells it; what it says is an option of run, and a method or a key that there is."""
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]  # it is a group
    known = [flag for param in command.params for flag in param.opts]
    assert option not in known
    takes = "VALUE" in MOVED[option]
    values = {"--search": "beam:4", "--choose": "vote", "--image-max-tokens": "5"}
    values |= dict.fromkeys(("--passages", "--refine", "--refine-tokens"), "2")
    value = values.get(option, "0.5")
    words = moved(["m", option, *([value] if takes else []), "-q"], known)
    spelled = words.partition(" write ")[2].split()
    assert spelled[0] in known or spelled[:2] == ["edgedec", "chat"], words
    if spelled[0] == "--method":
        asked: Any = asked_methods(
            [spelled[1].replace("skip:force", "skip:speedup=1,force").replace("refine:", "refine:true,")],
            "load",
            "text",
            "prompt",
        )
        assert next(iter(asked)).typed in names()
    if takes and option != "--system-file":
        assert value in words
        assert moved(["m", f"{option}={value}"], known).partition(" write ")[2] == words.partition(" write ")[2]


def test_scripts_that_hold_old_options_are_told(model: Path) -> None:
    """All of a line at once, ready to be pasted."""
    old = ("--small-model", "my model", "--entropy=0.75", "--draft-tree", "4x2", "--slide")
    run_here("run", model, "x", *old).failed(
        2,
        "for --small-model 'my model' --entropy=0.75 --draft-tree 4x2 --slide write "
        "--method 'switching:small-model=my model' --method switching:entropy=0.75 --draft-option tree=4x2 "
        "--method slide",
    )
    run_here("serve", "--draft-store=s").failed(2, "for --draft-store=s write --draft-option store=s")


def test_a_grammar_of_each_kind(model: Path, tmp_path: Path) -> None:
    """One option takes a schema, by its ending or its first character, a GBNF, a Lark grammar, and an expression."""
    schema, gbnf, lark = tmp_path / "a.txt", tmp_path / "b.gbnf", tmp_path / "c.lark"
    schema.write_text('{"enum": ["ab"]}', encoding="utf-8")
    gbnf.write_text('root ::= "ab"', encoding="utf-8")
    lark.write_text('start: "ab"', encoding="utf-8")
    for option, grammar, expected in (
        ("--json-schema", schema, '"ab"'),
        ("--grammar", schema, '"ab"'),
        ("--grammar", gbnf, "ab"),
        ("--json-schema", lark, "ab"),
        ("--grammar", "regex:ab", "ab"),
    ):
        found = run_here("run", model, "x", "-n", "9", "--runtime", "cpu", "--json", option, grammar)
        assert json.loads(found.out)["text"] == expected, grammar
