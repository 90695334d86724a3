"""edgedec run: a prompt in, text out."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec.engine import Engine
from edgedec.errors import CancelledError, RequestError, StorageError
from edgedec.generate import TokenStream
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec_apps.cli.opening import open_model, read_text, restore_prompt_cache, store_prompt_cache
from edgedec_apps.cli.options import LoadFlags, OutputFlags, SamplingFlags
from edgedec_apps.cli.terminal import interruptible, say, summary, write_text


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
    """Load, generate, print and report (CancelledError after an interrupted generation was reported)."""
    if job.raw and job.system is not None:
        raise RequestError("--system needs the chat template; leave out --raw")

    def work(cancel: CancelToken) -> Generation:
        with open_model(job.model, job.load, job.output, cancel) as engine:
            restore_prompt_cache(engine, job.load.prompt_cache)
            stream = _stream(engine, job, cancel)
            try:
                _write(stream, show=not job.output.as_json)
            finally:
                stream.close()
            store_prompt_cache(engine, job.load.prompt_cache)
            return stream.generation

    generation = interruptible(work)
    _report(generation, job.model, job.output)
    if generation.finish_reason == "cancelled":
        raise CancelledError("interrupted")


def find_prompt(prompt: str | None, file: Path | None) -> str | None:
    """Return the prompt, or None where a chat is meant."""
    if prompt is not None and file is not None:
        raise RequestError("give the prompt as an argument or with --file, not both")
    if prompt is not None:
        return prompt
    if file is not None:
        return read_text(file)
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return read_stdin()


def read_stdin() -> str:
    """Return all of standard input (RequestError unless it is UTF-8)."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error


def _stream(engine: Engine, job: Job, cancel: CancelToken) -> TokenStream:
    options = job.sampling.as_options()
    raw = job.raw
    if not raw and not engine.can_chat:
        if job.system is not None:
            raise RequestError("the model has no chat template, so --system means nothing to it; leave it out")
        if not job.output.quiet:
            say("edgedec: the model has no chat template; continuing the text as with --raw")
        raw = True
    if raw:
        return engine.stream(job.prompt, cancel=cancel, **options)
    messages = [{"role": "system", "content": job.system}] if job.system is not None else []
    return engine.chat_stream([*messages, {"role": "user", "content": job.prompt}], cancel=cancel, **options)


def _write(stream: TokenStream, *, show: bool) -> None:
    last = "\n"
    for token in stream:
        if show and token.text:
            write_text(token.text)
            last = token.text
    if show and not last.endswith("\n"):
        write_text("\n")


def _report(generation: Generation, model: str, output: OutputFlags) -> None:
    if not output.quiet:
        say(summary(generation))
    if not output.as_json and output.json_out is None:
        return
    document = json.dumps(as_document(generation, model), ensure_ascii=False)
    if output.as_json:
        print(document, flush=True)
    if output.json_out is not None:
        write_document(output.json_out, document)


def as_document(generation: Generation, model: str) -> dict[str, Any]:
    """Return the JSON object of a generation."""
    document: dict[str, Any] = {
        "model": model,
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "stats": generation.stats.as_dict(),
    }
    if any(output.logprob is not None for output in generation.outputs):
        document["logprobs"] = [
            {"token_id": output.token_id, "logprob": output.logprob, "top": dict(output.top_logprobs)}
            for output in generation.outputs
        ]
    return document


def write_document(path: Path, document: str) -> None:
    """Write a JSON file, whole or not at all (StorageError when it can't be)."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(document + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(f"{path} could not be written: {error}") from error
