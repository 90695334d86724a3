"""edgedec methods: what `--method`, `--draft` and `--draft-option` take."""

import re
from typing import Annotated

from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import argument

_BY = re.compile(r"^nothing.*| \([^()]*(?:python|edgedec bench|program at)[^()]*\)")
"""What the list leaves out: by which program something was measured."""


def command(
    name: Annotated[
        str | None,
        argument("NAME", "A method, a drafter, or diffusion:RULE, with its keys.", complete=completion.method),
    ] = None,
) -> None:
    """List other ways to write a text, and drafters: whom each is for, and what was measured of it.

    --method NAME[:KEY=VALUE,...] takes a method; a value without a key is its first key's. A comma ends a value where
    another key follows; a value in quotes holds any.
    """
    from edgedec.plugins import CHOOSERS, DENOISING_RULES, DRAFTERS, SEARCHES, SESSIONS, TEXT_METHODS, plugins
    from edgedec_apps.cli.draft_options import Drafting
    from edgedec_apps.cli.method_keys import shown_keys
    from edgedec_apps.cli.methods import about, doc_of, method_named, names
    from edgedec_apps.cli.shown.terminal import write_facts, write_line

    drafters, rules = plugins(DRAFTERS), plugins(DENOISING_RULES)
    if name is not None:
        rule = name.removeprefix("diffusion:")
        if name in drafters or (name.startswith("diffusion:") and rule in rules):
            doc, keys = doc_of(drafters.get(name) or rules[rule]), []
            usage = f"--draft {name}" if name in drafters else f"--method {name}"
        else:
            method = method_named(name)
            doc, keys, usage = method.doc, shown_keys(method.keys) if method.keys else [], f"--method {method.typed}"
        columns = zip(("what", "for", "measured", "write"), (*about(doc), usage), strict=True)
        write_facts([row for row in columns if row[1]])
        if keys:
            write_line("\nkeys; the value of the first one also without its name:")
            write_facts(keys, indent="  ")
        return
    for title, kinds in (
        ("How a text is written and read: --method NAME[:KEY=VALUE,...]", ("", SESSIONS, TEXT_METHODS)),
        ("One text of several, with --texts N: --method NAME", (CHOOSERS,)),
        ("Searches for one text: --method NAME:N", (SEARCHES,)),
    ):
        rows = list[tuple[str, str]]()
        for method in map(method_named, names()):
            if method.keys is not None and method.kind in kinds:
                _, gain, cost = about(method.doc)
                rows += [(method.typed, f"for {gain}"), *[("", text) for text in [_BY.sub("", cost)] if text]]
        write_line(f"{title}\n")
        write_facts(rows, indent="  ")
        write_line("")
    write_line("Drafters: --draft NAME, or several joined by +; the text is the same with each\n")
    lines = [(each.name, about(doc_of(each))[0].removeprefix(f"{each.name}: ")) for each in drafters.values()]
    write_facts(lines, indent="  ")
    write_line("\nHow drafts are made: --draft-option KEY=VALUE\n")
    write_facts(shown_keys(Drafting), indent="  ")
    write_line("\nRules of diffusion language models: --method diffusion:RULE\n")
    write_facts([("", ", ".join(rules))])
    write_line(
        "\nedgedec methods NAME shows the keys of a method and more of it; NAME may be a drafter or diffusion:RULE."
    )
