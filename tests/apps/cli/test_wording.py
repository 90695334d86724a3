"""Refusals in the words of who reads them: options at a terminal, arguments in Python."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from support.processes.command_line import run_here

import edgedec
from edgedec.api.options import DraftOptions, Lossy
from edgedec.decoding.prompt_length import CUT_DOCUMENT, CUT_TEXT
from edgedec.errors import EdgedecError, argument
from edgedec.sampling import SamplingParams
from edgedec_apps.cli.app import app
from edgedec_apps.cli.draft_options import Drafting
from edgedec_apps.cli.method_keys import shown_keys
from edgedec_apps.cli.methods import method_named
from edgedec_apps.cli.sampling_options import PENALTIES
from edgedec_apps.cli.wording import OPTIONS, TRAINING, in_options
from edgedec_export.training.train_drafter import TrainOptions

GUIDE = Path(__file__).parents[3] / "docs" / "embedding.md"
ONLY_PYTHON = set("model lossy methods drafting draft_max_rows grammars cache_dir on_progress cancel".split())
ONLY_PYTHON |= {"head", "texts"}
CUTS = {CUT_TEXT, CUT_DOCUMENT}
ONLY_ELSEWHERE = {"allow_requantize", "pooling", "passages", "max_document_tokens", *CUTS}
BY_ANOTHER_NAME = {"n_ctx", "n_draft_max", "n_gpu_layers", "n_parallel", "n_texts", "n_threads", "projector"}
BY_ANOTHER_NAME |= {"runtime_options", "max_document_tokens", "numerics", *CUTS}


def test_every_argument_has_its_option() -> None:
    """All of load() and of SamplingParams, but for what is Python's alone; and each option is one of run or serve."""
    arguments = {*inspect.signature(edgedec.load).parameters, *SamplingParams.names()}
    arguments |= {field.name for field in fields(Lossy)} | {f"draft_{field.name}" for field in fields(DraftOptions)}
    assert arguments - ONLY_PYTHON <= set(OPTIONS)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    known = {flag for name in ("run", "serve") for option in commands[name].params for flag in option.opts}
    options = {name: flag for name, flag in OPTIONS.items() if name not in TRAINING}
    assert {flag.partition(" ")[0] for name, flag in options.items() if name not in ONLY_ELSEWHERE} <= known
    keys = {f"--draft-option {typed.partition('=')[0]}" for typed, _ in shown_keys(Drafting)}
    assert {typed for typed in options.values() if typed.startswith("--draft-option")} <= keys
    for typed in options.values():
        option, _, rest = typed.partition(" ")
        assert option != "--penalty" or rest in PENALTIES
        kind = method_named(rest.partition(":")[0]).keys if option == "--method" else None
        assert kind is None or f" {rest.partition(':')[2]}" in " " + " ".join(each for each, _ in shown_keys(kind))


def test_every_option_of_a_training_has_its_field() -> None:
    """All fields of TrainOptions, but for what is Python's alone, and all options that train-drafter passes on."""
    names = {field.name for field in fields(TrainOptions)}
    assert names - ONLY_PYTHON - {"n_parallel", "save_every_s"} == {*TRAINING, "n_threads", "seed"}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    known = {flag for option in commands["train-drafter"].params for flag in option.opts}
    assert {OPTIONS[name] for name in (*TRAINING, "n_threads", "seed")} <= known


@pytest.mark.skipif(not GUIDE.exists(), reason="the documents are not beside the tests")
def test_the_guide_lists_the_options_of_another_name() -> None:
    """docs/embedding.md names both."""
    guide = " ".join(GUIDE.read_text(encoding="utf-8").split())
    assert [name for name in sorted(BY_ANOTHER_NAME - CUTS) if f"`{name}` (`{OPTIONS[name]}`)" not in guide] == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-c", "0"), "--context is 0; it must be from 1 to"),
        (("--threads", "999"), "--threads is 999; it must be from 1 to"),
        (("--kv-type", "q9"), "--kv-type is 'q9'; the cpu runtime takes f16"),
        (("--gpu-layers", "3"), "leave --device and --gpu-layers out"),
        (("--draft-option", "max=0"), "--draft-option max is 0; it must be from 1 to"),
        (("--draft-option", "max=-5"), "--draft-option max is -5; it must be from 1 to"),
        (("--draft-option", "max=70000"), "--draft-option max is 70000; it must be from 1 to"),
        (("-n", "0"), "--max-tokens is 0; it must be from 1\n"),
        (("--seed", "-1"), "--seed is -1; it must be 0 to 2^64-1\n"),
        (("--stop", ""), "--stop is ('',); it must hold strings, none of them empty\n"),
        (("--penalty", "last-n=-2"), "--penalty last-n is -2; "),
        (("--logit-bias", "7=1e40"), "--logit-bias must hold numbers"),
        (("--logit-bias", "99999=1"), "--logit-bias names token 99999; "),
        (("--draft-option", "rule=guess"), "--draft-option rule is 'guess'; "),
        (("--method", "switching:entropy=1"), "both, --method switching:small-model and --method switching:entropy\n"),
        (("--method", "switching:x,entropy=9"), "or force it (--method switching:entropy-force)\n"),
        (("--draft", "model"), "give one (--draft-option model)\n"),
        (
            ("--draft-option", "overlap=yes", "--draft", "suffix"),
            "--draft-option overlap takes a draft model (--draft-option model) and",
        ),
    ],
)
def test_a_refusal_names_the_option_that_was_typed(model: Path, args: tuple[str, ...], words: str) -> None:
    """And no argument of Python's, be its name another or the same with underscores."""
    result = run_here("run", model, "hi", "--runtime", "cpu", "-q", *args)
    result.failed(40, words)
    assert not re.search(r"\b[a-z]+_[a-z_]+\b", result.err), result.err


@pytest.mark.slow
@pytest.mark.parametrize(("check", "words"), [("x", "write NAME=COMMAND"), ("a=nope", "there is no program 'nope'")])
def test_a_check_of_the_server_is_refused_by_its_option(model: Path, check: str, words: str) -> None:
    """Before anything is loaded."""
    run_here("serve", model, "--check", check).failed(40, f"--check is {check.removeprefix('a=')!r}; {words}")


def test_what_a_message_quotes_stays() -> None:
    """Only what an error marks as an argument becomes an option: names in paths and texts are no options."""
    quoted = "/models/n_ctx is 5/kv_type.gguf: leave max_tokens out, or use seed"
    assert in_options(EdgedecError(quoted)) == quoted
    marked = EdgedecError(f"{quoted}, or leave {argument('n_ctx')} and {argument('max_rows')} out")
    assert in_options(marked) == f"{quoted}, or leave --context and max_rows out"
    assert str(marked) == f"{quoted}, or leave n_ctx and max_rows out"
