"""edgedec run: a prompt in, text out."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

from edgedec.api.engine import Engine
from edgedec.decoding.generate import TokenStream
from edgedec.errors import CancelledError, RequestError
from edgedec.memory_plan import MemoryPlan
from edgedec.progress import CancelToken, Progress, stage
from edgedec.sequence import Generation
from edgedec_apps.cli.grammar_options import cut_text, grammar_options
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.json_file import require_json_file, write_json_file
from edgedec_apps.cli.memory_report import held_document, held_line
from edgedec_apps.cli.opening import open_model, restore_prompt_cache, sampling_options, store_prompt_cache
from edgedec_apps.cli.options import LoadFlags, OutputFlags, SamplingFlags
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.terminal import say, say_summary, write_json, write_text


@dataclass(frozen=True, slots=True)
class Job:
    """What `edgedec run` was asked for."""

    model: str
    prompt: str
    raw: bool
    system: str | None
    load: LoadFlags
    sampling: SamplingFlags
    output: OutputFlags


def run_prompt(job: Job) -> None:
    """Load, generate, print and report.

    Raises:
        CancelledError, CutTextError: All is printed, but the generation was interrupted, or its grammar's text was cut.
    """
    if job.raw and job.system is not None:
        raise RequestError("--system needs the chat template; leave out --raw")
    if not job.raw and not job.prompt.strip():
        raise RequestError("the prompt is empty; give one as an argument, with --file or on standard input")
    if job.output.json_out is not None:
        require_json_file(job.output.json_out)
    grammar = grammar_options(job.sampling)
    options = sampling_options(job.sampling) | grammar

    def work(cancel: CancelToken) -> tuple[Generation, MemoryPlan]:
        with open_model(job.model, job.load, job.output, cancel, one_request=True, grammars=bool(grammar)) as engine:
            restore_prompt_cache(engine, job.load.prompt_cache)
            progress = ProgressLine(quiet=job.output.quiet)
            with progress as on_progress:
                stream = _stream(engine, job, options | {"cancel": cancel, "on_progress": on_progress})
                print_stream(stream, progress, n_most=options.get("max_tokens"), show=not job.output.as_json)
            store_prompt_cache(engine, job.load.prompt_cache)
            return stream.generation, engine.plan

    generation, plan = interruptible(work)
    _report(generation, plan, job.model, job.output)
    if generation.finish_reason == "cancelled":
        raise CancelledError("interrupted")
    if error := cut_text(generation):
        raise error


def print_stream(stream: TokenStream, progress: ProgressLine, *, n_most: int | None = None, show: bool) -> None:
    """Print the text as it comes, a line end after it, and close the stream; text that is not shown is counted."""
    last = ""
    try:
        with progress as on_progress:
            with stage(on_progress, "prefill"):
                first = next(stream, None)
            for n, token in enumerate(chain([] if first is None else [first], stream), start=1):
                if not show:
                    on_progress(Progress("generating", n, n_most, "tokens"))
                elif token.text:
                    progress.stop()
                    write_text(token.text)
                    last = token.text
    finally:
        stream.close()
    if last and not last.endswith("\n"):
        write_text("\n")


def _stream(engine: Engine, job: Job, options: dict[str, Any]) -> TokenStream:
    raw = job.raw
    if not raw and not engine.can_chat:
        if job.system is not None:
            raise RequestError("the model has no chat template, so --system means nothing to it; leave it out")
        if not job.output.quiet:
            say("edgedec: the model has no chat template; continuing the text as with --raw")
        raw = True
    if raw:
        return engine.stream(job.prompt, **options)
    messages = [{"role": "system", "content": job.system}] if job.system is not None else []
    return engine.chat_stream([*messages, {"role": "user", "content": job.prompt}], **options)


def _report(generation: Generation, plan: MemoryPlan, model: str, output: OutputFlags) -> None:
    if not output.quiet:
        say_summary(generation, explain=output.explain)
        if output.explain:
            say(f"  {held_line(plan)}")
    if not output.as_json and output.json_out is None:
        return
    document = as_document(generation, model) | {"memory": held_document(plan)}
    if output.as_json:
        write_json(document)
    if output.json_out is not None:
        write_json_file(output.json_out, document)


def as_document(generation: Generation, model: str) -> dict[str, Any]:
    """Return the JSON object of a generation."""
    document: dict[str, Any] = {
        "model": model,
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        **({} if generation.is_whole is None else {"is_whole": generation.is_whole}),
        "stats": generation.stats.as_dict(),
    }
    if any(output.logprob is not None for output in generation.outputs):
        document["logprobs"] = [
            {"token_id": output.token_id, "logprob": output.logprob, "top": dict(output.top_logprobs)}
            for output in generation.outputs
        ]
    return document
