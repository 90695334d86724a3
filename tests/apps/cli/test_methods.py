"""--method and --draft-option: what they take, what they refuse, the list of them, and options that went."""

import json
from pathlib import Path

import pytest
import typer
from support.processes.command_line import run_here

from edgedec.api.options import DraftOptions
from edgedec.plugins import CHOOSERS, DENOISING_RULES, DRAFTERS, SEARCHES, SESSIONS, TEXT_METHODS, plugins
from edgedec_apps.cli.app import app
from edgedec_apps.cli.draft_options import Drafting, drafting_of
from edgedec_apps.cli.method_keys import shown_keys, split_pairs
from edgedec_apps.cli.methods import about, asked_methods, method_named, names, text_options, values_of
from edgedec_apps.cli.opening import engine_options
from edgedec_apps.cli.options import LoadFlags
from edgedec_apps.cli.other_words import MOVED, moved


def test_the_list_has_every_method_and_drafter() -> None:
    """Each says what it does and whom it is for, and each key what it does; a page of one has its keys and defaults."""
    listed = run_here("methods").text
    for group in (SESSIONS, TEXT_METHODS, CHOOSERS, SEARCHES, DRAFTERS, DENOISING_RULES):
        typed = [name if group == DENOISING_RULES else name.replace("_", "-") for name in plugins(group)]
        assert [name for name in typed if name not in listed] in ([], ["futures", "predicate"])
    for method in map(method_named, names()):
        assert all(about(method.doc)[:2]), method.name
        keys = [] if method.keys is None or method.keys.__name__ == "Value" else shown_keys(method.keys)
        assert all(told for _, told in keys), method.name
    assert all(typed in listed for typed, _ in shown_keys(Drafting))
    for name, words in (
        ("prompt_keep", ("--method prompt-keep", "keep=X", "model=NAME", "first token in 0.42 of the time")),
        ("refine", ("n=N", "(default: 4)", "check-seconds=X")),
        ("suffix", ("--draft suffix",)),
        ("diffusion:threshold", ("--method diffusion:threshold", "2.13 tokens a forward")),
    ):
        page = run_here("methods", name)
        assert [each for each in words if each not in page.text] == [], page
    assert "--texts says how many" in run_here("methods", "vote").text  # n is refused there


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
        (("--draft-option", "=8"), "--draft-option is '=8'; write KEY=VALUE"),
        (("--draft-option", "mx=8"), "--draft-option has no key 'mx'; did you mean max?"),
        (("--draft-option", "max=x"), "--draft-option max is 'x'; it must be a whole number"),
        (("--draft-option", "numerics=fast"), "--draft-option numerics is 'fast'; it must be strict, padded or loose"),
        (("--penalty", "repeat=1.1"), "--penalty is 'repeat=1.1'; write NAME=X with one of repetition,"),
    ],
)
def test_what_is_refused(model: Path, args: tuple[str, ...], words: str) -> None:
    """By its name, with what there is, before a model is loaded."""
    run_here("run", model, "hi", "-q", *args).failed(40, words)


def test_a_method_of_texts_is_for_run(model: Path) -> None:
    """Other commands say so; methods of loading are theirs, too."""
    for command in ("serve", "bench", "plan"):
        run_here(command, model, "--method", "beam").failed(40, "--method beam has no effect here: edgedec run has it")


def test_nothing_is_lost_on_the_way() -> None:
    """Each key reaches the argument of edgedec.load, or the option of a text, that it stands for."""
    drafts = {"model": "small", "head": "off", "max": 7, "tree": "grow", "numerics": "loose", "store": "f"}
    given = [*(f"{name}={value}" for name, value in drafts.items()), "overlap=yes", "rule=block"]
    assert drafting_of(given) == Drafting(**drafts, rule="block", overlap=True)  # type: ignore[arg-type]
    methods = ["slide", "layer-skip:1.2,force=yes", "prompt_keep:0.5", "prompt-keep:model=m", "pictures:off"]
    options = engine_options(LoadFlags(method=methods, draft_option=given, gpu_layers="6GB"))
    assert (options.draft_model, options.draft_head, options.n_draft_max) == ("small", "off", 7)
    assert options.drafting == DraftOptions(overlap=True, tree="grow", numerics="loose", store="f")
    assert (options.projector, options.gpu_memory, options.n_gpu_layers) == (None, "6GB", None)
    assert engine_options(LoadFlags(gpu_layers="-1")).n_gpu_layers == -1
    lossy = options.lossy
    assert (lossy.slide, lossy.layer_skip, lossy.layer_skip_force) == (True, 1.2, True)
    assert lossy.methods == {"prompt_keep": {"keep": 0.5, "model": "m"}}
    texts = ["momentum:0.1", "ignore-end", "stop-unsure:0.5", "json-close", "min-tokens:3"]
    expected = {"momentum": 0.1, "ignore_end": True, "stop_unsure": 0.5, "json_close": True}
    assert text_options(values_of(asked_methods(texts, "text"))) == expected | {"methods": {"min_tokens": 3}}
    assert split_pairs("check='./c --x=1,n=2',n=3") == [("check", "./c --x=1,n=2"), ("n", "3")]


@pytest.mark.parametrize("option", MOVED)
def test_what_an_option_that_went_becomes(option: str) -> None:
    """The error spells it; what it says is an option of run, and a method or a key that there is."""
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]  # it is a group
    known = [flag for param in command.params for flag in param.opts]
    values = {"--search": "beam:4", "--choose": "vote", "--image-max-tokens": "5"}
    value = (values | dict.fromkeys(("--passages", "--refine", "--refine-tokens"), "2")).get(option, "0.5")
    spelled = moved(["m", option, *([value] if "VALUE" in MOVED[option] else []), "-q"], known).partition(" write ")[2]
    assert spelled.split()[0] in known or spelled.startswith("edgedec chat "), spelled
    assert spelled == moved(["m", f"{option}={value}"], known).partition(" write ")[2]
    if spelled.startswith("--method "):
        whole = (
            spelled.split()[1].replace("skip:force", "skip:speedup=1,force").replace("refine:", "refine:check=true,")
        )
        assert next(iter(asked_methods([whole], "load", "text", "prompt"))).typed in names()


def test_scripts_that_hold_old_options_are_told(model: Path) -> None:
    """All of a line at once, ready to be pasted."""
    old = ("--small-model", "my model", "--entropy=0.75", "--draft-tree", "4x2", "--slide")
    new = "--method 'switching:small-model=my model' --method switching:entropy=0.75 --draft-option tree=4x2"
    run_here("run", model, "x", *old).failed(2, f"--entropy=0.75 --draft-tree 4x2 --slide write {new} --method slide")
    run_here("serve", "--draft-store=s").failed(2, "for --draft-store=s write --draft-option store=s")


def test_a_grammar_of_each_kind(model: Path, tmp_path: Path) -> None:
    """One option takes a schema, by its ending or its first character, a GBNF, a Lark grammar, and an expression."""
    for name, grammar in (("a.txt", '{"enum": ["ab"]}'), ("b.gbnf", 'root ::= "ab"'), ("c.lark", 'start: "ab"')):
        (tmp_path / name).write_text(grammar, encoding="utf-8")
        found = run_here("run", model, "x", "-n", "9", "--runtime", "cpu", "--json", "--json-schema", tmp_path / name)
        assert json.loads(found.out)["text"].strip('"') == "ab"
