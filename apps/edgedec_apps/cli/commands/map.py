"""edgedec map: one question asked of each row of a file."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from edgedec.errors import CancelledError, RequestError, counted
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec_apps.cli.declared import argument, option, prompt_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import LoadFlags, ModelName, OutputFlags, Quiet, System
from edgedec_apps.cli.prompt import argument_text
from edgedec_apps.cli.sampling_options import SamplingFlags
from edgedec_apps.cli.shown.log import telling_of_losses
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import say

if TYPE_CHECKING:
    from edgedec.api.engine import Engine
    from edgedec_apps.cli.mapped_file import MappedFile
    from edgedec_apps.mapping import Row


@dataclass(frozen=True, kw_only=True)
class MapJob:
    """The arguments and options of `edgedec map`."""

    model: ModelName
    file: Annotated[
        Path,
        argument(
            "FILE",
            "The rows: lines of text, objects or texts of JSON (.jsonl, .json), a table (.csv); - is stdin.",
        ),
    ]
    prompt: str = prompt_flag(
        "--prompt -p TEXT", "What is asked of each row; {text} stands for a line, {name} for a value.", "{text}"
    )
    system: System = None
    out: Annotated[
        Path | None,
        option(
            "--out -o FILE",
            "The file of the answers, which an interrupted run goes on with (default: standard output).",
            panel="Output",
        ),
    ] = None
    parallel: Annotated[
        int, option("--parallel N", "Rows that are answered at a time.", panel="Model and memory", least=1, most=256)
    ] = 16
    load: LoadFlags
    sampling: SamplingFlags
    quiet: Quiet = False


@dataclass(slots=True)
class _Count:
    """What became of the rows: how many there are, are answered, and have errors; what was read, and the seconds."""

    n_rows: int
    n_done: int = 0
    n_failed: int = 0
    n_prompt_tokens: int = 0
    n_reused_tokens: int = 0
    seconds: float = 0.0


def command(job: MapJob) -> None:
    """Ask a model the same of each row of a file: a JSON object a line, in the order of the rows.

    Put what all rows share first in --prompt, which is read once: edgedec map MODEL FILE --prompt "Sort: {text}"
    --json-schema S --out ANSWERS.jsonl. The same command goes on where an interrupted one stopped. A row that has no
    answer gets a line with its error, and the exit code is 40 then.
    """
    from edgedec_apps.cli.mapped_file import MappedFile
    from edgedec_apps.cli.methods import require_stages, without_stages
    from edgedec_apps.cli.opening import open_model, text_options_of
    from edgedec_apps.mapping import names_a_place

    require_stages(job.load.method, "load", "text")
    prompt = argument_text(job.prompt, "--prompt") or ""
    if not names_a_place(prompt):
        raise RequestError("--prompt has no place for a row: write {text} where a line goes, or {name} for a value")
    options, system = text_options_of(job.model, job.load, job.sampling, argument_text(job.system, "--system"))
    rows, count = _rows(job), _Count(0)
    count.n_rows = len(rows)
    load = replace(job.load, method=without_stages(job.load.method, "text"))
    out = None if job.out is None else MappedFile(job.out)

    def work(cancel: CancelToken) -> bool:
        n_parallel = max(1, min(job.parallel, len(rows)))
        engine_options: dict[str, Any] = {"n_parallel": n_parallel, "grammars": "grammar" in options}
        with (
            open_model(job.model, load, OutputFlags(quiet=job.quiet), cancel, **engine_options) as engine,
            ProgressLine(quiet=job.quiet) as on_progress,
            telling_of_losses(quiet=job.quiet),
        ):
            for line in _answered(engine, rows, prompt, {"system": system} | options, out, count, cancel, on_progress):
                if out is None:
                    sys.stdout.write(line)
                    sys.stdout.flush()
                else:
                    out.add(line)
        return count.n_done < count.n_rows

    stopped = interruptible(work)
    where = "standard output" if job.out is None else str(job.out)
    if stopped:
        on = "" if job.out is None else "; the same command goes on from there"
        raise CancelledError(f"interrupted: {count.n_done} of {counted(count.n_rows, 'row')} are in {where}{on}")
    if not job.quiet:
        say(
            f"{counted(count.n_rows, 'row')} in {where} · {count.n_reused_tokens:,} of {count.n_prompt_tokens:,} "
            f"prompt tokens were read before · {count.seconds:.1f} s"
        )
    if count.n_failed:
        raise RequestError(
            f"{count.n_failed} of {counted(count.n_rows, 'row')} have no answer; their lines in {where} say why"
        )


def _rows(job: MapJob) -> "list[Row]":
    """Return the rows of the file, or of standard input (RequestError where there are none)."""
    from edgedec_apps.mapping import read_rows
    from edgedec_apps.texts import MOST_BYTES, decoded, read_text

    if str(job.file) == "-":
        content = decoded(sys.stdin.buffer.read(MOST_BYTES + 1), "standard input")
    else:
        content = read_text(job.file)
    rows = read_rows(content, job.file.suffix.lower())
    if not rows:
        raise RequestError(f"{job.file} has no rows; write one a line")
    return rows


def _answered(
    engine: "Engine",
    rows: "Sequence[Row]",
    prompt: str,
    options: dict[str, Any],
    out: "MappedFile | None",
    count: _Count,
    cancel: CancelToken,
    on_progress: OnProgress,
) -> Iterator[str]:
    """Yield the line of each row that is not in the output yet, and count it.

    Raises:
        RequestError: The schema does not go with the model, or the output is of other rows or settings.
        EdgedecError: As map_prompts.
    """
    from edgedec.sequence import Generation
    from edgedec_apps.cli.mapped_file import keys_of, line_of
    from edgedec_apps.cli.shown.replies import cut_text
    from edgedec_apps.mapping import map_prompts, tried

    prompts = [tried(prompt, row) for row in rows]
    if (grammar := options.get("grammar")) is not None:
        constraint = engine.requests.constraint_opener(grammar=grammar)()  # an error of the schema is none of a row
        if constraint is not None:
            constraint.close()
    template = None if engine.template is None else engine.template.source
    keys = keys_of(engine.card.fingerprint, options | {"template": template, "lora": engine.lora}, prompts)
    count.n_done, count.n_failed = (0, 0) if out is None else out.go_on(keys)
    report_progress(on_progress, "map", count.n_done, count.n_rows, "rows")
    begun = perf_counter()
    results = map_prompts(engine, prompts[count.n_done :], cancel=cancel, **options)
    for row, key, result in zip(rows[count.n_done :], keys[count.n_done :], results, strict=False):
        error: RequestError | None = None
        if isinstance(result, Generation):
            error = cut_text(result)
            if error is None and result.is_whole is False and result.finish_reason != "cancelled":
                error = RequestError(f"the text ends at {result.stop_string!r}, before its grammar allowed an end")
            count.n_prompt_tokens += result.stats.n_prompt_tokens
            count.n_reused_tokens += result.stats.n_reused_tokens
        yield line_of(row.number, key, error or result, is_json=grammar is not None and grammar.kind == "json_schema")
        count.n_done, count.seconds = count.n_done + 1, perf_counter() - begun
        count.n_failed += error is not None or not isinstance(result, Generation)
        report_progress(on_progress, "map", count.n_done, count.n_rows, "rows")
