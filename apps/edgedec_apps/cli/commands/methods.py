"""edgedec methods: what `--method`, `--draft` and `--draft-option` take."""

import re
from collections.abc import Iterable
from dataclasses import MISSING
from typing import Annotated

import typer

from edgedec_apps.cli import completion

_BY = re.compile(r"^nothing.*| \([^()]*(?:python|edgedec bench|program at)[^()]*\)")
"""What the list leaves out: by which program something was measured."""


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A method, a drafter, or a rule of diffusion:RULE, with all that is known.",
            show_default=False,
            autocompletion=completion.method,
        ),
    ] = None,
) -> None:
    """List other ways to write a text, and drafters: whom each is for, and what was measured of it.

    --method NAME[:KEY=VALUE,...] takes a method; a value without a key is its first key's. A comma ends a value where
    another key follows; a value in quotes holds any.
    """
    if name is None:
        _write_all()
    else:
        _write_one(name)


def _write_all() -> None:
    from edgedec.plugins import CHOOSERS, DENOISING_RULES, DRAFTERS, SEARCHES, SESSIONS, TEXT_METHODS, plugins
    from edgedec_apps.cli.draft_options import KEYS
    from edgedec_apps.cli.methods import about, all_methods
    from edgedec_apps.cli.shown.terminal import write_facts, write_line

    methods = list(all_methods())
    for title, kinds in (
        ("How a text is written and read: --method NAME[:KEY=VALUE,...]", ("", SESSIONS, TEXT_METHODS)),
        ("One text of several, with --texts N: --method NAME", (CHOOSERS,)),
        ("Searches for one text: --method NAME:N", (SEARCHES,)),
    ):
        write_line(f"{title}\n")
        rows = list[tuple[str, str]]()
        for method in methods:
            if method.kind in kinds and method.keys is not None:
                rows.append((method.typed, f"for {method.gain}"))
                if cost := _BY.sub("", method.cost):
                    rows.append(("", cost))
        write_facts(rows, indent="  ")
        write_line("")
    write_line("Drafters: --draft NAME, or several joined by +; the text is the same with each\n")
    drafters = plugins(DRAFTERS).values()
    told = [(each.name, about(each.target.partition(":")[0])[0]) for each in drafters]
    write_facts([(name, text.removeprefix(f"{name}: ")) for name, text in told], indent="  ")
    write_line("\nHow drafts are made: --draft-option KEY=VALUE\n")
    write_facts([(f"{key.typed}={key.words}", key.help) for key in KEYS], indent="  ")
    write_line("")
    write_line("Rules of diffusion language models: --method diffusion:RULE\n")
    write_facts([("", ", ".join(plugins(DENOISING_RULES)))])
    write_line(
        "\nedgedec methods NAME shows the keys of a method and more of it; NAME may be a drafter or diffusion:RULE."
    )


def _write_one(name: str) -> None:
    from edgedec.callers import did_you_mean
    from edgedec.errors import RequestError
    from edgedec.plugins import DENOISING_RULES, DRAFTERS, plugins
    from edgedec_apps.cli.methods import about, method_named, names
    from edgedec_apps.cli.shown.terminal import write_facts, write_line

    rule = plugins(DENOISING_RULES).get(name.removeprefix("diffusion:").replace("-", "_"))
    others = plugins(DRAFTERS) | ({} if rule is None else {name: rule})
    if name in others and name.replace("-", "_") not in (each.replace("-", "_") for each in names()):
        what, gain, cost = about(others[name].target.partition(":")[0])
        usage, keys = f"--draft {name}" if rule is None else f"--method diffusion:{rule.name}", []
    else:
        try:
            method = method_named(name)
        except RequestError:
            hint = did_you_mean(name, [*names(), *plugins(DRAFTERS)])
            raise RequestError(
                f"there is no method or drafter {name!r:.60}{hint} (edgedec methods lists all)"
            ) from None
        what, gain, cost, usage = method.what, method.gain, method.cost, f"--method {method.typed}"
        keys = [
            (
                f"{key.typed}={key.words}",
                key.help + ("" if key.default in (None, MISSING, "") else f" (default: {_shown(key.default)})"),
            )
            for key in method.keys or ()
        ]
    write_facts(_rows(what, gain, cost, usage))
    if keys:
        write_line("\nkeys, the first one's value also without its name:")
        write_facts(keys, indent="  ")


def _rows(what: str, gain: str, cost: str, usage: str) -> list[tuple[str, str]]:
    rows: Iterable[tuple[str, str]] = (("what", what), ("for", gain), ("measured", cost), ("write", usage))
    return [(name, text) for name, text in rows if text]


def _shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value}"
