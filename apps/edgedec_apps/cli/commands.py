"""The commands that run a model, and their options.

What commands do is imported when they are called: --help and completion stay fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from edgedec.defaults import N_DRAFT_MAX
from edgedec_apps.cli.options import (
    AsJson,
    JsonOut,
    LoadFlags,
    ModelName,
    Offline,
    OutputFlags,
    Quiet,
    RuntimeName,
    SamplingFlags,
    System,
    Threads,
    model_option,
    option,
    prompt_option,
    sampling_option,
)
from edgedec_apps.cli.serve_options import ServeFlags

_BENCH = "Benchmark"
_EVAL = "Evaluation"


def run(
    model: ModelName,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; without one: --file, standard input, or a chat."),
    ] = None,
    *,
    file: Annotated[
        Path | None,
        prompt_option("--file", "-f", help="Read the prompt from a file; - is standard input.", metavar="FILE"),
    ] = None,
    raw: Annotated[bool, prompt_option("--raw", help="Continue the text: no chat template.")] = False,
    system: System = None,
    load: LoadFlags,
    sampling: SamplingFlags,
    output: OutputFlags,
) -> None:
    """Run a model on a prompt: text goes to standard output, all else to standard error.

    At a terminal without a prompt it becomes a chat.
    """
    from edgedec_apps.cli.chat import converse
    from edgedec_apps.cli.prompt import argument_text, find_prompt
    from edgedec_apps.cli.run import Job, run_prompt

    text, system = find_prompt(prompt, file, load.memory), argument_text(system, "--system")
    if text is None:
        converse(model, raw, system, load, sampling, output)
    else:
        run_prompt(Job(model, text, raw, system, load, sampling, output))


def chat(
    model: ModelName,
    *,
    system: System = None,
    load: LoadFlags,
    sampling: SamplingFlags,
    output: OutputFlags,
) -> None:
    """Talk with a model. From a pipe, each line is a message."""
    from edgedec_apps.cli.chat import converse
    from edgedec_apps.cli.prompt import argument_text

    converse(model, False, argument_text(system, "--system"), load, sampling, output)


def serve(model: ModelName, *, load: LoadFlags, server: ServeFlags) -> None:
    """Serve a model over HTTP: OpenAI's and ollama's interfaces, and a web chat at /.

    Only this machine can reach it unless --host says otherwise. Ctrl-C ends it with exit code 130, SIGTERM with 0.
    """
    from edgedec_apps.cli.serve import run_server

    run_server(model, load, server)


def bench(
    model: ModelName,
    *,
    prompts: Annotated[
        Path | None,
        option(
            "--prompts",
            help="One JSON object a line: id, task, turns (default: our own, 4 of each of 5 tasks).",
            metavar="FILE",
            panel=_BENCH,
        ),
    ] = None,
    per_task: Annotated[
        int | None, option("--per-task", help="Only the first N prompts of every task.", metavar="N", panel=_BENCH)
    ] = None,
    against: Annotated[
        str | None,
        option("--against", help="Measure llamacpp in the same alternation.", metavar="NAME", panel=_BENCH),
    ] = None,
    warm_store: Annotated[
        bool,
        option("--warm-store", help="Let drafters keep what they learned in earlier runs.", panel=_BENCH),
    ] = False,
    rows: Annotated[
        Path | None,
        option("--rows", help="Record what drafters propose, for simulate.", metavar="FILE", panel=_BENCH),
    ] = None,
    curve_out: Annotated[
        Path | None,
        option("--curve-out", help="Write the measured cost of forwards to this file.", metavar="FILE", panel=_BENCH),
    ] = None,
    max_tokens: Annotated[
        int, sampling_option("--max-tokens", "-n", help="Most tokens to generate.", metavar="N")
    ] = 160,
    temperature: Annotated[
        float, sampling_option("--temperature", "-t", help="0 takes the most probable token.", metavar="X")
    ] = 0.0,
    top_p: Annotated[
        float | None, sampling_option("--top-p", help="Keep this much probability; 1 is off.", metavar="X")
    ] = None,
    load: LoadFlags,
    output: OutputFlags,
) -> None:
    """Measure how fast a model decodes with drafts and without, per task, and whether the texts are equal.

    Every prompt runs with drafts, plainly, and plainly again, in changing order; the last says what is noise.
    """
    from edgedec_apps.cli.bench import BenchJob, run_bench

    drawn = (max_tokens, temperature, top_p)
    run_bench(BenchJob(model, prompts, per_task, *drawn, against, warm_store, rows, curve_out, load, output))


def simulate(
    rows: Annotated[
        list[Path],
        typer.Argument(metavar="ROWS...", help="What edgedec bench --rows wrote; several are put side by side."),
    ],
    *,
    curve: Annotated[
        str | None,
        option(
            "--curve",
            help="A file of edgedec bench --curve-out, or a modelled device (default: all of these).",
            metavar="FILE",
            panel=_BENCH,
        ),
    ] = None,
    draft_max: Annotated[
        int, option("--draft-max", help="Most tokens of a draft.", metavar="N", panel=_BENCH)
    ] = N_DRAFT_MAX,
    as_json: AsJson = False,
) -> None:
    """Replay recorded drafts under another device's cost curve: what speculation would bring there.

    Of several recordings of the same texts, a table for each device says which way to draft is the fastest there.
    Drafting is charged: a forward through some of the layers by their bytes, a draft model's by its own.
    """
    from edgedec_apps.cli.simulate import simulate as replay

    replay(rows, curve, n_max=draft_max, as_json=as_json)


def evaluate(
    model: ModelName,
    *,
    text: Annotated[
        Path | None,
        option("--text", help="A text in UTF-8 (default: our own, of 2,200 tokens).", metavar="FILE", panel=_EVAL),
    ] = None,
    window: Annotated[
        int, option("--window", help="Cut the text into windows of at most N tokens.", metavar="N", panel=_EVAL)
    ] = 512,
    max_tokens: Annotated[
        int | None, option("--max-tokens", "-n", help="Only the first N tokens of the text.", metavar="N", panel=_EVAL)
    ] = None,
    kv_type: Annotated[
        list[str] | None,
        option("--kv-type", help="Element type of the KV cache (default: f16). Repeatable.", metavar="T", panel=_EVAL),
    ] = None,
    layers: Annotated[
        list[str] | None,
        option("--layers", help="Layers to run, such as 0-11,14-29, or all. Repeatable.", metavar="R", panel=_EVAL),
    ] = None,
    layer_skip: Annotated[
        list[float] | None,
        option(
            "--layer-skip",
            help="LOSSY: the layers that run --layer-skip X runs, whatever they cost. Repeatable.",
            metavar="X",
            panel=_EVAL,
        ),
    ] = None,
    against: Annotated[
        str,
        option(
            "--against",
            help="The baseline's model: another file of the same vocabulary, or the same.",
            metavar="MODEL",
            panel=_EVAL,
        ),
    ] = "same",
    against_runtime: Annotated[
        str | None,
        option("--against-runtime", help="The baseline's runtime (default: the same).", metavar="NAME", panel=_EVAL),
    ] = None,
    plot: Annotated[
        bool, option("--plot", help="Also draw quality against speed, in plain text.", panel=_EVAL)
    ] = False,
    plot_out: Annotated[
        Path | None,
        option(
            "--plot-out",
            help="Also draw quality against speed as a picture (needs matplotlib).",
            metavar="FILE.png",
            panel=_EVAL,
        ),
    ] = None,
    runtime: RuntimeName = "auto",
    threads: Threads = None,
    offline: Offline = False,
    as_json: AsJson = False,
    json_out: JsonOut = None,
    quiet: Quiet = False,
) -> None:
    """Measure what a KV type, left-out layers or another file cost in quality and bring in speed.

    Each window of a text is predicted token by token from the true tokens before. The baseline (f16, all layers) comes
    first, then every KV type with every set of layers. --against judges MODEL, a quantization or an export, against
    the file that it was made from. Figures: perplexity; KL divergence from the baseline in nats,
    its mean and 99th percentile; how often both find the same token the most probable; and tokens per second, decoded
    one at a time at the ends of the windows, without drafts.
    """
    from edgedec_apps.cli.evaluate import EvalJob, run_eval

    run_eval(
        EvalJob(
            model=model,
            text=text,
            window=window,
            max_tokens=max_tokens,
            against=against,
            against_runtime=against_runtime,
            runtime=runtime,
            kv_types=tuple(kv_type or ()),
            layers=tuple(layers or ()),
            layer_skips=tuple(layer_skip or ()),
            threads=threads,
            offline=offline,
            as_json=as_json,
            json_out=json_out,
            plot=plot,
            plot_out=plot_out,
            quiet=quiet,
        )
    )


def plan(
    model: ModelName,
    *,
    load: LoadFlags,
    parallel: Annotated[
        int | None,
        model_option("--parallel", help="As edgedec serve, with N requests at once (default: as run).", metavar="N"),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what a model will hold in memory, what is given up to keep within --memory, and what else would fit.

    It plans for the one prompt of edgedec run: what is held with a short text, and where the context is full. A chat
    keeps more of earlier texts to draft from, as edgedec serve with --parallel 1 does.
    """
    from edgedec_apps.cli.plan import Wanted, print_plan

    print_plan(model, Wanted(load, parallel), as_json=as_json, quiet=quiet)
