"""The options of `edgedec run` that choose among several texts of a prompt, or search for one."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from edgedec_apps.cli import completion
from edgedec_apps.cli.options import option

choice_option = partial(option, panel="Better answers")


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
    scorer_seconds: Annotated[
        float | None,
        choice_option(
            "--scorer-seconds", help="Most seconds of a call of the scorer (default: 60).", metavar="N", further=True
        ),
    ] = None
