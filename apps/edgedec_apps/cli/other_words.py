"""The words of llama.cpp and ollama, and edgedec's for the same: what an error names where one of theirs was typed."""

from collections.abc import Iterable

_MODEL, _PROMPT = "the model's name as the first argument", "the prompt as the argument behind the model's name"
OPTIONS = {
    "--temp": "--temperature",
    **dict.fromkeys(("--ctx-size", "--n-ctx", "--num-ctx", "--max-seq-len"), "--context"),
    **dict.fromkeys(("--n-predict", "--predict", "--num-predict"), "--max-tokens"),
    **dict.fromkeys(("-m", "--model", "-hf", "-hfr", "--hf-repo"), _MODEL),
    **dict.fromkeys(("-p", "--prompt"), _PROMPT),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--num-gpu"), "--gpu-layers"),
    "--repeat-penalty": "--repetition-penalty",
    "--repeat-last-n": "--penalty-last-n",
    **dict.fromkeys(("-md", "--model-draft"), "--draft-model"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system"),
    **dict.fromkeys(("-sysf", "--system-prompt-file"), "--system-file"),
    **dict.fromkeys(("-r", "--reverse-prompt"), "--stop"),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "--kv-type"),
    **dict.fromkeys(("-fa", "--flash-attn"), "--runtime-option flash_attention=yes"),
    **dict.fromkeys(("-np", "--n-parallel"), "--parallel"),
    "--ignore-eos": "--ignore-end",
    **dict.fromkeys(("--no-context-shift", "--context-shift"), "--slide"),
    **dict.fromkeys(("-j", "--json-schema-file"), "--json-schema"),
    **dict.fromkeys(("--draft-n", "--spec-draft-n-max"), "--draft-max"),
    "--chat-template-file": "--chat-template",
    **dict.fromkeys(("--n-threads", "--num-thread"), "--threads"),
    "--format": "--json-schema",
    "--keepalive": "--keep-alive",
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), "edgedec chat"),
    **dict.fromkeys(("--embedding", "--embeddings"), "edgedec embed"),
}
"""What is typed here for an option of theirs: an option, a command, or where the value stands."""

COMMANDS = {
    **dict.fromkeys(("server", "llama-server", "start"), "serve"),
    **dict.fromkeys(("cli", "llama-cli", "generate", "completion", "llama-completion"), "run"),
    **dict.fromkeys(("remove", "delete"), "rm"),
    **dict.fromkeys(("download", "get", "fetch"), "pull"),
    "llama-bench": "bench",
    **dict.fromkeys(("perplexity", "llama-perplexity"), "eval"),
    **dict.fromkeys(("quantize", "llama-quantize", "convert"), "export"),
    **dict.fromkeys(("embedding", "llama-embedding"), "embed"),
    **dict.fromkeys(("models", "tags"), "list"),
    **dict.fromkeys(("cp", "copy"), "create"),
    **dict.fromkeys(("llama-gguf", "inspect"), "info"),
    "version": "--version",
    "help": "--help",
}
"""The command here for a command of theirs."""


def own_words(words: Iterable[str], *, known: Iterable[str], commands: bool) -> str:
    """Return what edgedec calls the first of these words that is llama.cpp's or ollama's; "" where none is.

    Args:
        words: What was typed.
        known: The options that the command has: they mean what they mean here.
        commands: Whether the first word should have been a command.

    >>> own_words(["qwen3-4b", "--temp", "0.2"], known=["--temperature"], commands=False)
    'for --temp write --temperature'
    >>> own_words(["--temperature=1"], known=["--temperature"], commands=False)
    ''
    >>> own_words(["llama-server"], known=[], commands=True)
    'for llama-server write edgedec serve'
    """
    table = {word: f"edgedec {own}" for word, own in COMMANDS.items()} if commands else OPTIONS
    meant = set(known)
    for word in words:
        name = word.partition("=")[0]
        if name in table and name not in meant:
            return f"for {name} write {table[name]}"
    return ""
