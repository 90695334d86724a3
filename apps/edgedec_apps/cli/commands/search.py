"""edgedec search: models in the catalogue and on a Hugging Face hub."""

from dataclasses import asdict
from typing import Annotated

from edgedec.load_options import ResolveOptions
from edgedec.progress import CancelToken
from edgedec_apps.cli.commands.list import billions
from edgedec_apps.cli.declared import argument, output_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, Offline, Quiet
from edgedec_apps.cli.reports.expectations import of_found
from edgedec_apps.cli.shown.progress import shown
from edgedec_apps.cli.shown.terminal import one_line, write_json, write_line, write_paragraph, write_table
from edgedec_models.catalogue import Entry, load_catalogue
from edgedec_models.hubs.search import FoundModel, search_hub

_HEADINGS, _DOWNLOADS = ("NAME", "PARAMETERS", "MEMORY", "DOWNLOADS", "LICENCE", "WHAT RUNS IT"), 3


def command(
    words: Annotated[list[str], argument("WORDS...", "Words that the name has.")],
    *,
    limit: int = output_flag("--limit N", "Most results of the hub, 1 to 100.", 20),
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search the catalogue and the Hugging Face hub for models in GGUF files, by words of their names.

    The most downloaded repositories come first. The memory is the least that a file of the type Q4_K_M needs: its
    weights. edgedec run, chat and pull take the names that are shown.
    """
    entries = [entry for entry in load_catalogue().values() if _has(entry, words)]
    for entry in [] if as_json else entries:
        state = "of the catalogue" if entry.tried else "of the catalogue, not tried"
        write_paragraph(f"{entry.name}: {one_line(entry.note)} ({state})", hanging="    ")

    def work(cancel: CancelToken) -> list[FoundModel]:
        with shown("searching the hub", quiet=quiet):
            return search_hub(words, limit, ResolveOptions(offline=offline, cancel=cancel))

    models = interruptible(work)
    if as_json:
        write_json({"catalogue": [entry.name for entry in entries], "hub": list(map(asdict, models))})
        return
    if not models:
        write_line("the hub has no repository with a GGUF model of such a name")
        return
    write_table([_HEADINGS, *map(_row, models)], dropped=_DOWNLOADS)


def _has(entry: Entry, words: list[str]) -> bool:
    text = f"{entry.name} {entry.note}".lower()
    return all(word.lower() in text for word in words)


def _row(model: FoundModel) -> tuple[str, ...]:
    expected = of_found(model)
    terms = ", after its terms were accepted on the hub" if model.gated else ""
    cells = (
        model.name,
        "-" if model.n_params is None else billions(model.n_params),
        expected.memory(),
        "-" if model.n_downloads is None else f"{model.n_downloads:,}",
        model.licence or "-",
        f"{expected.runtime or 'unknown'}{terms}",
    )
    return tuple(map(one_line, cells))
