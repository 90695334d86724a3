"""The options of a generation: sampling, grammars, and choosing among several texts of a prompt."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edgedec.errors import RequestError
from edgedec_apps.cli import completion
from edgedec_apps.cli.options import option

if TYPE_CHECKING:
    from edgedec.grammar import Grammar

sampling_option = partial(option, panel="Sampling")
choice_option = partial(option, panel="Better answers")


@dataclass(frozen=True)
class SamplingFlags:
    """The options of a generation; an option that is not given has the model's default."""

    max_tokens: Annotated[
        int | None, sampling_option("--max-tokens", "-n", help="Most tokens to generate.", metavar="N")
    ] = None
    temperature: Annotated[
        float | None,
        sampling_option("--temperature", "-t", help="0 always takes the most probable token.", metavar="X"),
    ] = None
    top_k: Annotated[
        int | None, sampling_option("--top-k", help="Keep the N most probable tokens; 0 is off.", metavar="N")
    ] = None
    top_p: Annotated[
        float | None, sampling_option("--top-p", help="Keep this much probability; 1 is off.", metavar="X")
    ] = None
    min_p: Annotated[
        float | None,
        sampling_option(
            "--min-p",
            help="Keep tokens with at least X times the probability of the best; 0 is off.",
            metavar="X",
            further=True,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, sampling_option("--repetition-penalty", help="1 is off.", metavar="X")
    ] = None
    frequency_penalty: Annotated[
        float | None, sampling_option("--frequency-penalty", help="0 is off.", metavar="X", further=True)
    ] = None
    presence_penalty: Annotated[
        float | None, sampling_option("--presence-penalty", help="0 is off.", metavar="X", further=True)
    ] = None
    momentum: Annotated[
        float | None,
        sampling_option(
            "--momentum",
            help="Take X times n from the probability of a token that repeats n tokens, n from 2 to 5; 0 is off.",
            metavar="X",
            further=True,
        ),
    ] = None
    penalty_last_n: Annotated[
        int | None,
        sampling_option(
            "--penalty-last-n",
            help="Number of last tokens that the penalties count; -1 for all.",
            metavar="N",
            further=True,
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        sampling_option(
            "--logit-bias",
            help="Add B to the logit of token ID; -inf excludes it. Repeatable.",
            metavar="ID=B",
            further=True,
        ),
    ] = None
    seed: Annotated[int | None, sampling_option("--seed", help="Same seed, same text.", metavar="N")] = None
    stop: Annotated[
        list[str] | None,
        sampling_option("--stop", help="End the text before this string. Repeatable.", metavar="TEXT"),
    ] = None
    stop_unsure: Annotated[
        float | None,
        sampling_option(
            "--stop-unsure",
            help="For completions: end the text before a token whose estimated chance to be right is below P, 0 to 1.",
            metavar="P",
            further=True,
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        sampling_option(
            "--logprobs",
            help="With --json: log-probabilities of the N most probable tokens.",
            metavar="N",
            further=True,
        ),
    ] = None
    verify: Annotated[
        str | None,
        sampling_option(
            "--verify",
            help="coupled (default) keeps the text; tokenwise, block, recursive, kseq, multipath its distribution.",
            metavar="RULE",
            complete=completion.rule,
            further=True,
        ),
    ] = None
    ignore_end: Annotated[bool, sampling_option("--ignore-end", help="Continue past end tokens.", further=True)] = False
    json_schema: Annotated[
        Path | None,
        sampling_option(
            "--json-schema",
            help="Write JSON that fits the schema in this file; a cut text gives exit code 45.",
            metavar="FILE",
        ),
    ] = None
    json_close: Annotated[
        bool,
        sampling_option(
            "--json-close",
            help="Reserve tokens to complete the JSON, or the text of any grammar, within --max-tokens.",
            further=True,
        ),
    ] = False
    regex: Annotated[
        str | None,
        sampling_option(
            "--regex",
            help="Write a text that this regular expression matches as a whole.",
            metavar="REGEX",
            further=True,
        ),
    ] = None
    grammar: Annotated[
        Path | None,
        sampling_option(
            "--grammar",
            help="Write a text of the grammar in this file: GBNF where its name ends in .gbnf, else Lark.",
            metavar="FILE",
            further=True,
        ),
    ] = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by the names of SamplingParams; for grammars see grammar_options()."""
        names = {field.name for field in fields(self)} - {"json_schema", "json_close", "regex", "grammar"}
        given = {name: getattr(self, name) for name in names}
        given["stop"] = tuple(self.stop) if self.stop else None
        given["logit_bias"] = dict(map(_bias, self.logit_bias)) if self.logit_bias else None
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class ChoiceFlags:
    """The options of choosing and searching."""

    texts: Annotated[
        str | None,
        choice_option(
            "--texts",
            "-k",
            help="Write N texts of the prompt together, text k with the seed plus k; auto: as many as --choose needs.",
            metavar="N|auto",
        ),
    ] = None
    choose: Annotated[
        str | None,
        choice_option(
            "--choose",
            help="Print one of the texts: by vote, likely, score, or another way of docs/better-answers.md.",
            metavar="METHOD",
            complete=completion.chooser,
        ),
    ] = None
    search: Annotated[
        str | None,
        choice_option(
            "--search",
            help="Search for one text: beam, or another search of docs/better-answers.md, and its size.",
            metavar="METHOD[:N]",
            complete=completion.search,
        ),
    ] = None
    answer: Annotated[
        str | None,
        choice_option(
            "--answer",
            help='What an answer is, for votes (default: what follows "Answer:").',
            metavar="REGEX",
            further=True,
        ),
    ] = None
    scorer: Annotated[
        str | None,
        choice_option(
            "--scorer",
            help="A program and its arguments, which no shell reads: it gets texts as JSON and prints their scores.",
            metavar="COMMAND",
            further=True,
        ),
    ] = None
    refine: Annotated[
        int | None,
        choice_option(
            "--refine",
            help="Write, check by --scorer, and write again what did not pass: one text first, then N together.",
            metavar="N",
            further=True,
        ),
    ] = None
    refine_seconds: Annotated[
        float | None,
        choice_option("--refine-seconds", help="End --refine after so many seconds.", metavar="X", further=True),
    ] = None
    refine_tokens: Annotated[
        int | None,
        choice_option(
            "--refine-tokens", help="Begin no texts once so many tokens are written.", metavar="N", further=True
        ),
    ] = None
    scorer_seconds: Annotated[
        float | None,
        choice_option(
            "--scorer-seconds", help="Most seconds of a call of the scorer (default: 60).", metavar="N", further=True
        ),
    ] = None


def grammar_options(flags: SamplingFlags) -> dict[str, Any]:
    """Return the options `grammar` and `json_close` of Engine.stream; an empty dict where the flags name no grammar.

    Raises:
        RequestError: The flags name several grammars, or --json-close without one; a file is not UTF-8; the grammar
            is invalid with any model.
        StorageError: A file can't be read.
    """
    given = [name for name in ("json_schema", "regex", "grammar") if getattr(flags, name) is not None]
    if not given:
        if flags.json_close:
            raise RequestError("--json-close needs a grammar; give --json-schema, --regex or --grammar too")
        return {}
    if len(given) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        raise RequestError(f"{names} are given, and a text follows one grammar; give one of them")
    if flags.ignore_end:
        raise RequestError("--ignore-end continues past the end, which a grammar decides; leave --ignore-end out")
    from edgedec_runtimes.grammar.compiler import require_valid

    require_valid(grammar := _grammar(flags))
    return {"grammar": grammar, "json_close": flags.json_close}


def _grammar(flags: SamplingFlags) -> "Grammar":
    from edgedec.grammar import Grammar
    from edgedec_apps.cli.prompt import argument_text
    from edgedec_apps.texts import read_text

    if flags.json_schema is not None:
        return Grammar.json_schema(read_text(flags.json_schema))
    if flags.grammar is not None:
        is_gbnf = flags.grammar.suffix.lower() == ".gbnf"
        return (Grammar.gbnf if is_gbnf else Grammar.lark)(read_text(flags.grammar))
    return Grammar.regex(argument_text(flags.regex, "--regex") or "")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise RequestError(f"--logit-bias is {text!r}; write TOKEN_ID=BIAS, such as 50256=-inf") from error
