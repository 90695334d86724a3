"""Command-line options, declared once and shared by the commands that load and generate.

Each option can also be given by an environment variable: EDGEDEC_ and its name.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from edgedec.errors import RequestError

_MODEL, _SAMPLING, _OUTPUT = "Model and memory", "Sampling", "Output"


def option(*flags: str, help: str, panel: str | None = None, metavar: str | None = None) -> Any:
    """Declare an option with its environment variable (EDGEDEC_MAX_TOKENS for --max-tokens)."""
    name = flags[0].split("/")[0].strip("-").replace("-", "_").upper()
    return typer.Option(
        *flags, help=help, rich_help_panel=panel, envvar=f"EDGEDEC_{name}", show_envvar=False, metavar=metavar
    )


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A path, a name that edgedec list shows, hf:owner/repo:Q4_K_M, or ollama:name.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, option("--json", help="Print one JSON object to standard output.", panel=_OUTPUT)]
Offline = Annotated[bool, option("--offline", help="Never touch the network.", panel=_MODEL)]


@dataclass(frozen=True)
class LoadFlags:
    """How the model is loaded."""

    runtime: Annotated[str, option("--runtime", help="Runtime, or auto.", panel=_MODEL)] = "auto"
    context: Annotated[
        int | None,
        option("--context", "-c", help="Tokens of context (default: as trained, at most 4096).", panel=_MODEL),
    ] = None
    memory: Annotated[
        str | None,
        option("--memory", help="Cap on the process, such as 900MB or 1.5GiB; over it, refuse.", panel=_MODEL),
    ] = None
    threads: Annotated[int | None, option("--threads", help="Threads (default: the cores usable).", panel=_MODEL)] = (
        None
    )
    draft: Annotated[str | None, option("--draft", help="Drafter (edgedec doctor lists them).", panel=_MODEL)] = None
    draft_max: Annotated[int, option("--draft-max", help="Most tokens of a draft.", panel=_MODEL)] = 8
    kv_type: Annotated[str, option("--kv-type", help="Element type of the KV cache.", panel=_MODEL)] = "f16"
    flash_attention: Annotated[
        bool | None,
        option(
            "--flash-attention/--no-flash-attention",
            help="Fused attention (default: the runtime decides).",
            panel=_MODEL,
        ),
    ] = None
    mmap: Annotated[bool, option("--mmap/--no-mmap", help="Map the weights from the file.", panel=_MODEL)] = True
    repack: Annotated[
        bool, option("--repack/--no-repack", help="Rearrange weights for speed, at a cost in memory.", panel=_MODEL)
    ] = True
    gpu_layers: Annotated[int | None, option("--gpu-layers", help="Layers on the GPU, -1 for all.", panel=_MODEL)] = (
        None
    )
    device: Annotated[str | None, option("--device", help="Device (edgedec doctor lists them).", panel=_MODEL)] = None
    chat_template: Annotated[
        Path | None, option("--chat-template", help="Jinja file to use instead of the model's own.", panel=_MODEL)
    ] = None
    prompt_cache: Annotated[
        Path | None,
        option("--prompt-cache", help="File to restore the KV cache from, and to save it to.", panel=_MODEL),
    ] = None
    offline: Offline = False


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are drawn; what is not given is left to the model's own defaults."""

    max_tokens: Annotated[
        int | None, option("--max-tokens", "-n", help="Most tokens to generate.", panel=_SAMPLING)
    ] = None
    temperature: Annotated[
        float | None, option("--temperature", "-t", help="0 takes the most probable token.", panel=_SAMPLING)
    ] = None
    top_k: Annotated[int | None, option("--top-k", help="Keep the k most probable tokens.", panel=_SAMPLING)] = None
    top_p: Annotated[float | None, option("--top-p", help="Keep this much probability.", panel=_SAMPLING)] = None
    min_p: Annotated[
        float | None, option("--min-p", help="Keep tokens this probable, relative to the best.", panel=_SAMPLING)
    ] = None
    repetition_penalty: Annotated[float | None, option("--repetition-penalty", help="1 is off.", panel=_SAMPLING)] = (
        None
    )
    frequency_penalty: Annotated[float | None, option("--frequency-penalty", help="0 is off.", panel=_SAMPLING)] = None
    presence_penalty: Annotated[float | None, option("--presence-penalty", help="0 is off.", panel=_SAMPLING)] = None
    penalty_last_n: Annotated[
        int | None, option("--penalty-last-n", help="Tokens that the penalties look at; -1 for all.", panel=_SAMPLING)
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        option("--logit-bias", help="TOKEN_ID=BIAS; -inf rules it out. Repeatable.", panel=_SAMPLING, metavar="ID=B"),
    ] = None
    seed: Annotated[int | None, option("--seed", help="Same seed, same text.", panel=_SAMPLING)] = None
    stop: Annotated[
        list[str] | None, option("--stop", help="End the text before this string. Repeatable.", panel=_SAMPLING)
    ] = None
    logprobs: Annotated[
        int | None, option("--logprobs", help="With --json: log-probabilities of the N best.", panel=_SAMPLING)
    ] = None
    ignore_end: Annotated[bool, option("--ignore-end", help="Go on past end tokens.", panel=_SAMPLING)] = False

    def as_options(self) -> dict[str, Any]:
        """Return what was given, by the names of SamplingParams."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["stop"] = tuple(self.stop) if self.stop else None
        given["logit_bias"] = dict(map(_bias, self.logit_bias)) if self.logit_bias else None
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class OutputFlags:
    """What is printed where."""

    as_json: AsJson = False
    json_out: Annotated[
        Path | None, option("--json-out", help="Also write the JSON object to this file.", panel=_OUTPUT)
    ] = None
    quiet: Annotated[bool, option("--quiet", "-q", help="No progress and no summary.", panel=_OUTPUT)] = False
    verbose: Annotated[bool, option("--verbose", "-v", help="Show the runtimes' log.", panel=_OUTPUT)] = False


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise RequestError(f"--logit-bias {text!r}: write TOKEN_ID=BIAS, such as 50256=-inf") from error


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each dataclass parameter replaced by the dataclass's own options, as typer wants them."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not (isinstance(hint, type) and is_dataclass(hint)):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = hint
        inner = get_type_hints(hint, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=inner[field.name]
            )
            for field in fields(hint)
        ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        packed = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**values, **packed)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # or typer would look through to the original
    return run
