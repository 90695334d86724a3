"""Command-line options, declared once and shared by the commands that load and generate."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from edgedec_apps.cli import completion
from edgedec_apps.cli.help_text import FURTHER

_MODEL, _PROMPT, _OUTPUT = "Model and memory", "Prompt", "Output"
_TILES = "Tiles"

_WITH_VARIABLE = (
    *("--runtime", "--draft", "--context", "--memory", "--threads", "--offline"),
    *("--max-tokens", "--temperature", "--quiet", "--host", "--port", "--api-key"),
)
"""The options that an environment variable can give, too: EDGEDEC_MAX_TOKENS for --max-tokens."""


def option(
    *flags: str,
    help: str,
    panel: str,
    metavar: str | None = None,
    complete: completion.Complete | None = None,
    further: bool = False,
    least: int | None = None,
    most: int | None = None,
) -> Any:
    """Declare an option.

    Args:
        flags: How it is typed.
        help: A sentence.
        panel: The group of options that it belongs to.
        metavar: What stands for its value.
        complete: Returns the values that begin with a text, for tab completion; None for names of files.
        further: Whether only --help-all shows it, and --help does not.
        least: The least number that it takes, where one is refused before a model is loaded.
        most: The largest such number.
    """
    name = flags[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(
        *flags,
        help=help,
        rich_help_panel=f"{panel}{FURTHER}" if further else panel,
        envvar=f"EDGEDEC_{name}" if flags[0] in _WITH_VARIABLE else None,
        show_envvar=False,
        metavar=metavar,
        autocompletion=complete,
        min=least,
        max=most,
        readable=False,  # a path that can't be read is a StorageError where it is read, not a usage error
    )


model_option = partial(option, panel=_MODEL)
prompt_option = partial(option, panel=_PROMPT)
output_option = partial(option, panel=_OUTPUT)
tiles_option = partial(option, panel=_TILES)

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A path, a name that edgedec list shows, hf:owner/repo:Q4_K_M, or ollama:name.",
        show_default=False,
        autocompletion=completion.any_model,
    ),
]
AsJson = Annotated[bool, output_option("--json", help="Print one JSON object to standard output.")]
Context = Annotated[
    int | None,
    model_option("--context", "-c", help="Tokens of context (default: as trained, if memory allows).", metavar="N"),
]
MemoryCap = Annotated[
    str | None,
    model_option("--memory", help="Most memory of the process, such as 900MB or 1.5GiB.", metavar="SIZE"),
]
Offline = Annotated[bool, model_option("--offline", help="Never use the network.")]
JsonOut = Annotated[
    Path | None,
    output_option("--json-out", help="Also write the JSON object to this file.", metavar="FILE", further=True),
]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="Print no progress and no summary.")]
RuntimeName = Annotated[
    str,
    model_option(
        "--runtime", help="The runtime, or auto for the fastest.", metavar="NAME", complete=completion.runtime
    ),
]
Threads = Annotated[
    int | None,
    model_option("--threads", help="Number of threads (default: the usable cores).", metavar="N", further=True),
]
Adapters = Annotated[
    list[str] | None,
    model_option(
        "--lora",
        help="A LoRA adapter of the model, a GGUF or a folder of PEFT, perhaps with its scale. Repeatable.",
        metavar="FILE[=SCALE]",
        further=True,
    ),
]
System = Annotated[
    str | None, prompt_option("--system", help='The system message ("$(cat FILE)" for that of a file).', metavar="TEXT")
]


@dataclass(frozen=True)
class LoadFlags:
    """The options of loading a model."""

    runtime: RuntimeName = "auto"
    context: Context = None
    memory: Annotated[
        str | None,
        model_option(
            "--memory",
            help="Most memory of the process, such as 900MB or 1.5GiB; what needs more is refused.",
            metavar="SIZE",
        ),
    ] = None
    threads: Threads = None
    draft: Annotated[
        str,
        model_option(
            "--draft",
            help="auto guesses where it pays, off never; drafters by name (edgedec methods), joined by +, always.",
            metavar="NAME",
            complete=completion.drafter,
        ),
    ] = "auto"
    draft_option: Annotated[
        list[str] | None,
        model_option(
            "--draft-option",
            help="How drafts are made: model=NAME for a smaller model that drafts, max=N, and others that edgedec "
            "methods lists. Repeatable.",
            metavar="KEY=VALUE",
            complete=completion.draft_option,
        ),
    ] = None
    method: Annotated[
        list[str] | None,
        model_option(
            "--method",
            help="Another way to write a text, such as beam:n=4 or slide; edgedec methods lists all, with what each "
            "costs and gains. Repeatable.",
            metavar="NAME[:K=V,...]",
            complete=completion.method,
        ),
    ] = None
    lora: Adapters = None
    kv_type: Annotated[
        str,
        model_option(
            "--kv-type",
            help="Element type of the KV cache, such as q8_0; the cpu runtime has f16, q8_0, gear and q4_0.",
            metavar="TYPE",
            complete=completion.one_of("f16", "q8_0", "gear", "q4_0"),
            further=True,
        ),
    ] = "f16"
    gpu_layers: Annotated[
        str | None,
        model_option(
            "--gpu-layers",
            help="Layers on the GPU: a number, -1 for all, or as many as fit into a size such as 6GB.",
            metavar="N|SIZE",
        ),
    ] = None
    device: Annotated[
        str | None,
        model_option(
            "--device",
            help="A device (edgedec doctor --all lists them), gpu for any, auto where a GPU was measured to be faster.",
            metavar="NAME",
            further=True,
        ),
    ] = None
    runtime_option: Annotated[
        list[str] | None,
        model_option(
            "--runtime-option",
            help="An option that only the runtime has, such as mmap=no or huge_pages=off. Repeatable.",
            metavar="NAME=VALUE",
            further=True,
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        model_option(
            "--chat-template",
            help="Jinja file to use instead of the model's own template.",
            metavar="FILE",
            further=True,
        ),
    ] = None
    prompt_cache: Annotated[
        str | None,
        model_option(
            "--prompt-cache",
            help="Most of the disk for prompts that were read, so that none is read twice (cpu runtime); off: none. "
            "By default 2GB in run, chat and serve.",
            metavar="SIZE",
            further=True,
        ),
    ] = None
    offline: Offline = False

    @property
    def n_gpu_layers(self) -> int | None:
        """The layers on the GPU, where their number is given."""
        is_number = self.gpu_layers is not None and self.gpu_layers.removeprefix("-").isdecimal()
        return int(self.gpu_layers or 0) if is_number else None

    @property
    def gpu_memory(self) -> str | None:
        """The most memory on each GPU, where a size is given instead of a number of layers."""
        return self.gpu_layers if self.n_gpu_layers is None else None


@dataclass(frozen=True)
class OutputFlags:
    """The options of the output."""

    as_json: AsJson = False
    json_out: JsonOut = None
    quiet: Quiet = False
    explain: Annotated[
        bool, output_option("--explain", help="After the text, say on one screen what drafting did, and why.")
    ] = False
    verbose: Annotated[
        bool,
        output_option(
            "--verbose",
            "-v",
            help="Show the runtimes' log; with --explain, all costs, drafters, reasons.",
            further=True,
        ),
    ] = False

    @property
    def detail(self) -> Literal["none", "short", "all"]:
        """How much is explained after a text."""
        return "none" if not self.explain else "all" if self.verbose else "short"


def parsed(text: str) -> int | float | bool | str:
    """Return a number or a truth value that a text stands for, else the text.

    >>> parsed("5"), parsed("0.5"), parsed("true"), parsed("five")
    (5, 0.5, True, 'five')
    """
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
