"""Command-line options, declared once and shared by the commands that load and generate."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from edgedec.load_options import N_DRAFT_MAX
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
Passages = Annotated[
    int | None,
    prompt_option(
        "--passages",
        help="Most passages that are read of a document longer than the context (default: a quarter of the context).",
        metavar="N",
        further=True,
        least=1,
    ),
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
    int | None, model_option("--threads", help="Number of threads (default: the usable cores).", metavar="N")
]
Adapters = Annotated[
    list[str] | None,
    model_option(
        "--lora",
        help="A LoRA adapter of the model, a GGUF or a folder of PEFT, perhaps with its scale. Repeatable.",
        metavar="FILE[=SCALE]",
    ),
]
System = Annotated[str | None, prompt_option("--system", help="The system message.", metavar="TEXT")]
SystemFile = Annotated[
    Path | None, prompt_option("--system-file", help="File with the system message.", metavar="FILE", further=True)
]
KeepHistory = Annotated[
    bool,
    prompt_option(
        "--history/--no-history", help="Keep what is typed in a chat, for the next start (default: yes).", further=True
    ),
]


@dataclass(frozen=True)
class LoadFlags:
    """The options of loading a model."""

    runtime: RuntimeName = "auto"
    context: Context = None
    slide: Annotated[
        bool,
        model_option(
            "--slide", help="LOSSY: continue a full context with its first and its newest tokens.", further=True
        ),
    ] = False
    layer_skip: Annotated[
        float | None,
        model_option(
            "--layer-skip",
            help="LOSSY: leave out layers until a token reads 1/X of the bytes; about X times as fast, another text.",
            metavar="X",
            further=True,
        ),
    ] = None
    layer_skip_force: Annotated[
        bool,
        model_option(
            "--layer-skip-force", help="Allow a --layer-skip beyond what was measured for the model.", further=True
        ),
    ] = False
    memory: Annotated[
        str | None,
        model_option(
            "--memory",
            help="Most memory of the process, such as 900MB or 1.5GiB; what needs more is refused.",
            metavar="SIZE",
        ),
    ] = None
    gpu_memory: Annotated[
        str | None,
        model_option(
            "--gpu-memory",
            help="Most memory on each GPU, here and elsewhere (default: what is free); it gets as many layers as fit.",
            metavar="SIZE",
            further=True,
        ),
    ] = None
    threads: Threads = None
    draft: Annotated[
        str,
        model_option(
            "--draft",
            help="auto guesses where it pays, off never; drafters by name (edgedec doctor --all), joined by +, always.",
            metavar="NAME",
            complete=completion.drafter,
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        model_option(
            "--draft-model",
            help="A smaller model of the same family to draft with.",
            metavar="MODEL",
            complete=completion.any_model,
        ),
    ] = None
    draft_head: Annotated[
        str | None,
        model_option(
            "--draft-head",
            help="A trained draft head for this model (default: the one that is found, see docs/heads.md), or off.",
            metavar="HEAD",
            complete=completion.draft_head,
            further=True,
        ),
    ] = None
    lora: Adapters = None
    draft_overlap: Annotated[
        bool,
        model_option(
            "--draft-overlap",
            help="Let the draft model run on the CPU while the target verifies on another device or machine.",
            further=True,
        ),
    ] = False
    draft_tree: Annotated[
        str | None,
        model_option(
            "--draft-tree",
            help="How a draft model or head branches: chain, grow, siblings:K, beam:K, paths:K (default: by --verify).",
            metavar="SHAPE",
            complete=completion.tree_shape,
            further=True,
        ),
    ] = None
    draft_max: Annotated[
        int, model_option("--draft-max", help="Most tokens of a draft.", metavar="N", further=True)
    ] = N_DRAFT_MAX
    draft_numerics: Annotated[
        str,
        model_option(
            "--draft-numerics",
            help="strict: drafts only as long as they keep the text; padded: steps of a few rows, so that longer ones "
            "do, too; loose: longer ones, and the text may differ.",
            metavar="MODE",
            complete=completion.one_of("strict", "padded", "loose"),
            further=True,
        ),
    ] = "strict"
    draft_store: Annotated[
        Path | None,
        model_option(
            "--draft-store",
            help="File that keeps earlier outputs for the suffix drafter.",
            metavar="FILE",
            further=True,
        ),
    ] = None
    small_model: Annotated[
        str | None,
        model_option(
            "--small-model",
            help="LOSSY: a smaller model of the same vocabulary writes where the text is easy; without drafts.",
            metavar="MODEL",
            complete=completion.any_model,
            further=True,
        ),
    ] = None
    entropy: Annotated[
        float | None,
        model_option(
            "--entropy",
            help="The small model writes while the mean entropy of the last tokens is below X bits.",
            metavar="X",
            further=True,
        ),
    ] = None
    entropy_force: Annotated[
        bool, model_option("--entropy-force", help="Allow an --entropy beyond what was measured.", further=True)
    ] = False
    denoise: Annotated[
        str | None,
        model_option(
            "--denoise",
            help="Of a diffusion language model: the rule that commits tokens, perhaps with its number.",
            metavar="RULE",
            complete=completion.denoising_rule,
            further=True,
        ),
    ] = None
    prompt_keep: Annotated[
        float | None,
        model_option(
            "--prompt-keep",
            help="LOSSY: read this share of a long prompt's tokens, such as 0.3.",
            metavar="X",
            further=True,
        ),
    ] = None
    prompt_keep_model: Annotated[
        str | None,
        model_option(
            "--prompt-keep-model",
            help="The smaller model of the same vocabulary that says which; by default the model's own first layers.",
            metavar="MODEL",
            complete=completion.any_model,
            further=True,
        ),
    ] = None
    kv_type: Annotated[
        str,
        model_option(
            "--kv-type",
            help="Element type of the KV cache, such as q8_0; the cpu runtime has f16, q8_0, gear and q4_0.",
            metavar="TYPE",
            complete=completion.one_of("f16", "q8_0", "gear", "q4_0"),
        ),
    ] = "f16"
    gpu_layers: Annotated[
        int | None, model_option("--gpu-layers", help="Number of layers on the GPU; -1 for all.", metavar="N")
    ] = None
    device: Annotated[
        str | None,
        model_option(
            "--device",
            help="A device (edgedec doctor --all lists them), gpu for any, auto where a GPU was measured to be faster.",
            metavar="NAME",
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
    mmproj: Annotated[
        str,
        model_option(
            "--mmproj",
            help="The projector file with which the model reads pictures; auto: the one beside the model; off: none.",
            metavar="FILE",
            further=True,
        ),
    ] = "auto"
    image_max_tokens: Annotated[
        int | None,
        model_option(
            "--image-max-tokens",
            help="Most tokens of a picture, for models that can choose: fewer are faster, and show less.",
            metavar="N",
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
        ),
    ] = None
    offline: Offline = False


@dataclass(frozen=True)
class OutputFlags:
    """The options of the output."""

    as_json: AsJson = False
    json_out: JsonOut = None
    quiet: Quiet = False
    explain: Annotated[
        bool, output_option("--explain", help="After the text, say on one screen what drafting did, and why.")
    ] = False
    explain_all: Annotated[
        bool,
        output_option("--explain-all", help="The same with all that is known: costs, drafters, reasons.", further=True),
    ] = False
    verbose: Annotated[bool, output_option("--verbose", "-v", help="Show the runtimes' log.", further=True)] = False

    @property
    def detail(self) -> Literal["none", "short", "all"]:
        """How much is explained after a text."""
        return "all" if self.explain_all else "short" if self.explain else "none"


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
