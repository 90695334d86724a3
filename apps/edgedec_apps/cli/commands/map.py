"""edgedec map: one question asked of each row of a file."""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from edgedec.errors import CancelledError, RequestError, counted
from edgedec.exact_json import dumps
from edgedec.progress import CancelToken, report_progress
from edgedec_apps.cli.declared import argument, model_flag, output_flag, prompt_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import LoadFlags, ModelName, OutputFlags, Quiet, System
from edgedec_apps.cli.output_files import require_writable
from edgedec_apps.cli.prompt import argument_text
from edgedec_apps.cli.sampling_options import SamplingFlags
from edgedec_apps.cli.shown.log import telling_of_losses
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import say, write_text


def command(
    model: ModelName,
    file: Annotated[
        Path, argument("FILE", "The rows, a line each: text, or in a .jsonl an object or text of JSON; - is stdin.")
    ],
    *,
    prompt: str = prompt_flag(
        "--prompt -p TEXT", "What is asked of each row; {text} stands for a line, {name} for a value.", "{text}"
    ),
    system: System = None,
    out: Path | None = output_flag(
        "--out -o FILE", "The file of the answers, which a later run goes on with (default: standard output)."
    ),
    parallel: int = model_flag("--parallel N", "Rows that are answered at a time.", 16, least=1, most=256),
    load: LoadFlags,
    sampling: SamplingFlags,
    quiet: Quiet = False,
) -> None:
    """Ask a model the same of each row of a file: a JSON object a line, in the order of the rows.

    Put what all rows share first in --prompt, which is read once: edgedec map MODEL FILE --prompt "Sort: {text}"
    --json-schema S --out ANSWERS.jsonl. The same command goes on where an interrupted one stopped. A row that has no
    answer gets a line with its error, and the exit code is 40 then.
    """
    from edgedec.sequence import Generation
    from edgedec_apps.cli.mapped_file import add_line, answer_of, keys_of, n_answered
    from edgedec_apps.cli.methods import require_stages, without_stages
    from edgedec_apps.cli.opening import open_model, text_options_of
    from edgedec_apps.mapping import map_prompts, prompts_of
    from edgedec_apps.texts import MOST_BYTES, decoded, read_text

    require_stages(load.method, "load", "text")
    options, system = text_options_of(model, load, sampling, argument_text(system, "--system"))
    content = decoded(sys.stdin.buffer.read(MOST_BYTES + 1), "stdin") if str(file) == "-" else read_text(file)
    prompts = prompts_of(argument_text(prompt, "--prompt") or "", content, is_json=file.suffix.lower() == ".jsonl")
    require_writable(out)
    load, grammar = replace(load, method=without_stages(load.method, "text")), options.get("grammar")
    n_rows, n_done, n_failed, n_read, n_reused, seconds = len(prompts), 0, 0, 0, 0, 0.0

    def work(cancel: CancelToken) -> None:
        nonlocal n_done, n_failed, n_read, n_reused, seconds
        parts: dict[str, Any] = {"n_parallel": min(parallel, n_rows), "grammars": grammar is not None}
        with (
            open_model(model, load, OutputFlags(quiet=quiet), cancel, **parts) as engine,
            ProgressLine(quiet=quiet) as on_progress,
            telling_of_losses(quiet=quiet),
            suppress(CancelledError),  # the rows so far are written
        ):
            if grammar is not None:  # an error of the schema is none of a row
                engine.requests.require_grammar(grammar)
            template = None if engine.template is None else engine.template.source
            settings = options | {"system": system, "template": template, "lora": engine.lora}
            keys = keys_of(engine.card.fingerprint, settings, prompts.values())
            n_done, n_failed, n_bytes = (0, 0, 0) if out is None else n_answered(out, keys)
            report_progress(on_progress, "map", n_done, n_rows, "rows")
            numbers, begun = [*prompts][n_done:], perf_counter()
            results = map_prompts(engine, map(prompts.__getitem__, numbers), system=system, cancel=cancel, **options)
            for number, key, result in zip(numbers, keys[n_done:], results, strict=True):
                answer = answer_of(number, key, result, is_json=grammar is not None and grammar.kind == "json_schema")
                line = dumps(answer) + "\n"
                if out is None:
                    write_text(line)
                else:
                    n_bytes = add_line(out, line, n_bytes)
                n_done, n_failed = n_done + 1, n_failed + ("error" in answer)
                if isinstance(result, Generation):
                    n_read, n_reused = n_read + result.stats.n_prompt_tokens, n_reused + result.stats.n_reused_tokens
                seconds = perf_counter() - begun
                report_progress(on_progress, "map", n_done, n_rows, "rows")

    interruptible(work)
    where = "standard output" if out is None else str(out)
    if n_done < n_rows:
        on = "" if out is None else "; the same command goes on from there"
        raise CancelledError(f"interrupted: {n_done} of {counted(n_rows, 'row')} are in {where}{on}")
    if not quiet:
        tokens = f"{n_reused:,} of {n_read:,} prompt tokens were read before"
        say(f"{counted(n_rows, 'row')} in {where} · {tokens} · {seconds:.1f} s")
    if n_failed:
        raise RequestError(f"{n_failed} of {counted(n_rows, 'row')} have no answer; their lines in {where} say why")
