"""Command-line options, declared once and shared by the commands that load and generate."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import (
    argument,
    flag,
    model_flag,
    model_option,
    output_flag,
    output_option,
    prompt_option,
)

ModelName = Annotated[
    str,
    argument(
        "MODEL",
        "A path, a name that edgedec list shows, hf:owner/repo:Q4_K_M, or ollama:name.",
        complete=completion.any_model,
    ),
]
AsJson = Annotated[bool, output_option("--json", "Print one JSON object to standard output.")]
Context = Annotated[
    int | None, model_option("--context -c N", "Tokens of context (default: as trained, if memory allows).")
]
Offline = Annotated[bool, model_option("--offline", "Never use the network.")]
JsonOut = Annotated[
    Path | None, output_option("--json-out FILE", "Also write the JSON object to this file.", further=True)
]
Quiet = Annotated[bool, output_option("--quiet -q", "Print no progress and no summary.")]
RuntimeName = Annotated[
    str, model_option("--runtime NAME", "The runtime, or auto for the fastest.", complete=completion.runtime)
]
Threads = Annotated[
    int | None, model_option("--threads N", "Number of threads (default: the usable cores).", further=True)
]
Adapters = Annotated[
    list[str] | None,
    model_option(
        "--lora FILE[=SCALE]",
        "A LoRA adapter of the model, a GGUF or a folder of PEFT, perhaps with its scale. Repeatable.",
        further=True,
    ),
]
System = Annotated[str | None, prompt_option("--system TEXT", 'The system message ("$(cat FILE)" for that of a file).')]


@dataclass(frozen=True)
class LoadFlags:
    """The options of loading a model."""

    runtime: RuntimeName = "auto"
    context: Context = None
    memory: str | None = model_flag(
        "--memory SIZE", "Most memory of the process, such as 900MB or 1.5GiB; what needs more is refused."
    )
    threads: Threads = None
    draft: str = model_flag(
        "--draft NAME",
        "auto guesses where it pays, off never; drafters by name (edgedec methods), joined by +, always.",
        "auto",
        complete=completion.drafter,
    )
    draft_option: list[str] | None = model_flag(
        "--draft-option KEY=VALUE",
        "How drafts are made: model=NAME for a smaller model, max=N tokens, and more that edgedec methods "
        "lists. Repeatable.",
        complete=completion.draft_option,
    )
    method: list[str] | None = model_flag(
        "--method NAME[:K=V,...]",
        "Another way to write a text, such as beam:n=4 or slide; edgedec methods lists all, with what each "
        "costs and gains. Repeatable.",
        complete=completion.method,
    )
    lora: Adapters = None
    kv_type: str = model_flag(
        "--kv-type TYPE",
        "Element type of the KV cache; the cpu runtime has f16, q8_0, q8_0/q4_0 (keys/values), gear and q4_0.",
        "f16",
        complete=completion.one_of("f16", "q8_0", "q8_0/q4_0", "gear", "q4_0"),
        further=True,
    )
    gpu_layers: str | None = model_flag(
        "--gpu-layers N|SIZE", "Layers on the GPU: a number, -1 for all, or as many as fit into a size such as 6GB."
    )
    device: str | None = model_flag(
        "--device NAME",
        "A device (edgedec doctor --all lists them), gpu for any, auto where a GPU was measured to be faster.",
        further=True,
    )
    runtime_option: list[str] | None = model_flag(
        "--runtime-option NAME=VALUE",
        "An option that only the runtime has, such as mmap=no or huge_pages=off. Repeatable.",
        further=True,
    )
    chat_template: Path | None = model_flag(
        "--chat-template FILE", "Jinja file to use instead of the model's own template.", further=True
    )
    prompt_cache: str | None = model_flag(
        "--prompt-cache SIZE",
        "Most of the disk for prompts that were read, so that none is read twice (cpu runtime); off: none. "
        "By default 2GB in run, chat and serve.",
        further=True,
    )
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
class UndraftedFlags:
    """The options of loading a model that writes no text."""

    runtime: RuntimeName = "auto"
    context: Context = None
    memory: str | None = model_flag("--memory SIZE", "Most memory of the process, such as 900MB or 1.5GiB.")
    threads: Threads = None
    offline: Offline = False

    @property
    def flags(self) -> LoadFlags:
        """The same as those of a model that writes texts."""
        return LoadFlags(
            self.runtime, self.context, self.memory, threads=self.threads, draft="off", offline=self.offline
        )


@dataclass(frozen=True)
class OutputFlags:
    """The options of the output."""

    as_json: AsJson = False
    json_out: JsonOut = None
    quiet: Quiet = False
    explain: bool = output_flag("--explain", "After the text, say on one screen what drafting did, and why.", False)
    verbose: bool = output_flag(
        "--verbose -v", "Show the runtimes' log; with --explain, all costs, drafters, reasons.", False, further=True
    )

    @property
    def detail(self) -> Literal["none", "short", "all"]:
        """How much is explained after a text."""
        return "none" if not self.explain else "all" if self.verbose else "short"


@dataclass(frozen=True)
class ToolFlags:
    """The options of tools of other programs."""

    mcp: str | None = flag(
        "--mcp FILE",
        "File of tool servers (MCP) that the model may use, or off (default: mcp.json beside catalogue.toml).",
        panel="Tools",
    )
    allow_tools: str | None = flag(
        "--allow-tools NAMES",
        "Tools that run without a question, by name, with commas; read_* stands for all that begin so.",
        panel="Tools",
    )


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
