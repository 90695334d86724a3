"""edgedec plan: its options; edgedec_apps.cli.reports.plan makes and prints the plan."""

from pathlib import Path

from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import model_flag
from edgedec_apps.cli.options import AsJson, LoadFlags, ModelName, Quiet


def command(
    model: ModelName,
    *,
    load: LoadFlags,
    parallel: int | None = model_flag("--parallel N", "As edgedec serve, with N requests at once (default: as run)."),
    texts: int = model_flag("--texts N", "As edgedec serve or run, with N texts of one prompt.", 1),
    plot: Path | None = model_flag(
        "--plot FILE", "Also draw the memory by term, as an SVG or a PNG (needs matplotlib)."
    ),
    machine: str | None = model_flag(
        "--machine NAME",
        "Plan for another machine, such as jetson-orin-nano-8gb (docs/memory.md lists them).",
        complete=completion.machine,
    ),
    image: list[Path] | None = model_flag(
        "--image -i FILE", "Also show how many tokens this picture becomes. Repeatable."
    ),
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show the memory that a model will need, what changes to fit --memory, and what else would fit.

    The plan is for the one prompt of edgedec run: the memory with a short text, and with a full context. A chat keeps
    more of the earlier texts to draft from, as edgedec serve with --parallel 1 does.
    """
    from edgedec_apps.cli.reports.plan import PlannedUse, print_plan

    use = PlannedUse(load, parallel, machine, texts, tuple(image or ()))
    print_plan(model, use, plot=plot, as_json=as_json, quiet=quiet)
