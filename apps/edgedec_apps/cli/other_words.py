"""The words of llama.cpp and ollama, and edgedec's earlier ones: an error names what is typed here for the same."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from shlex import quote

_MODEL, _PROMPT = "the model's name as the first argument", "the prompt as the argument behind the model's name"
OPTIONS = {
    "--temp": "--temperature",
    **dict.fromkeys(("--ctx-size", "--n-ctx", "--num-ctx", "--max-seq-len"), "--context"),
    **dict.fromkeys(("--n-predict", "--predict", "--num-predict"), "--max-tokens"),
    **dict.fromkeys(("-m", "--model", "-hf", "-hfr", "--hf-repo"), _MODEL),
    **dict.fromkeys(("-p", "--prompt"), _PROMPT),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--num-gpu"), "--gpu-layers"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system"),
    **dict.fromkeys(("-sysf", "--system-prompt-file"), '--system "$(cat FILE)"'),
    **dict.fromkeys(("-r", "--reverse-prompt"), "--stop"),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "--kv-type"),
    **dict.fromkeys(("-fa", "--flash-attn"), "--runtime-option flash_attention=yes"),
    **dict.fromkeys(("-np", "--n-parallel"), "--parallel"),
    "--ignore-eos": "--method ignore-end",
    **dict.fromkeys(("--no-context-shift", "--context-shift"), "--method slide"),
    **dict.fromkeys(("-j", "--json-schema-file"), "--json-schema"),
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


MOVED: Mapping[str, str] = {
    "--answer": "--method WAY:answer=",
    "--choose": "--method ",
    "--denoise": "--method diffusion:denoise=",
    "--draft-head": "--draft-option head=",
    "--draft-max": "--draft-option max=",
    "--draft-model": "--draft-option model=",
    "--draft-numerics": "--draft-option numerics=",
    "--draft-overlap": "--draft-option overlap=yes",
    "--draft-store": "--draft-option store=",
    "--draft-tree": "--draft-option tree=",
    "--embedding-model": "--method passages:model=",
    "--entropy": "--method switching:entropy=",
    "--entropy-force": "--method switching:entropy-force=yes",
    "--explain-all": "--explain --verbose",
    "--frequency-penalty": "--penalty frequency=",
    "--gpu-memory": "--gpu-layers ",
    "--no-history": "edgedec chat --no-history",
    "--ignore-end": "--method ignore-end",
    "--image-max-tokens": "--method pictures:max-tokens=",
    "--json-close": "--method json-close",
    "--layer-skip": "--method layer-skip:speedup=",
    "--layer-skip-force": "--method layer-skip:force=yes",
    "--mmproj": "--method pictures:projector=",
    "--momentum": "--method momentum:x=",
    "--passages": "--method passages:n=",
    "--penalty-last-n": "--penalty last-n=",
    "--presence-penalty": "--penalty presence=",
    "--prompt-keep": "--method prompt-keep:keep=",
    "--prompt-keep-model": "--method prompt-keep:model=",
    "--refine": "--method refine:n=",
    "--refine-seconds": "--method refine:seconds=",
    "--refine-tokens": "--method refine:tokens=",
    "--regex": "--grammar regex:",
    "--repetition-penalty": "--penalty repetition=",
    "--scorer": "--method WAY:scorer=",
    "--scorer-seconds": "--method WAY:scorer-seconds=",
    "--search": "--method ",
    "--slide": "--method slide",
    "--small-model": "--method switching:small-model=",
    "--stop-unsure": "--method stop-unsure:chance=",
    "--system-file": '--system "$(cat FILE)"',
    "--verify": "--draft-option rule=",
    **dict.fromkeys(("-md", "--model-draft"), "--draft-option model="),
    **dict.fromkeys(("--draft-n", "--spec-draft-n-max"), "--draft-option max="),
    "--repeat-penalty": "--penalty repetition=",
    "--repeat-last-n": "--penalty last-n=",
}
"""What is typed for an option that went, or for one of theirs with the same value, which stands behind "=", ":" or " ".

WAY is what --search, --choose or --refine names; else score, or vote for --answer.
"""
_SPLITS = re.compile(r",[a-z][\w-]*=")
_WAYS = {"--search": "", "--choose": "", "--refine": "refine"}


def moved(words: Sequence[str], known: Collection[str]) -> str:
    """Return what to type now for the options that went among these words, with their values; "" for none.

    >>> moved(["m", "--draft-tree", "4x2", "--slide"], ["--draft"])
    'for --draft-tree 4x2 --slide write --draft-option tree=4x2 --method slide'
    >>> moved(["m", "--entropy=1", "--small-model", "a b"], [])
    "for --entropy=1 --small-model 'a b' write --method 'switching:entropy=1,small-model=a b'"
    >>> moved(["m", "--refine", "2", "--scorer", "./check -x"], [])
    "for --refine 2 --scorer './check -x' write --method 'refine:n=2,check=./check -x'"
    """
    typed, methods, others = list[str](), dict[str, list[str]](), list[str]()
    old, way = list[tuple[str, str]](), ""
    places = iter(range(len(words)))
    for place in places:
        name, sign, value = words[place].partition("=")
        if name not in MOVED or name in known:
            continue
        typed.append(name + (f"={quote(value)}" if sign else ""))
        if not sign and MOVED[name].endswith(("=", ":", " ", '"')) and place + 1 < len(words):
            value = words[next(places)]
            typed.append(quote(value))
        if name in _WAYS:
            way = _WAYS[name] or value.partition(":")[0]
        old.append((MOVED[name], value))
    for pattern, value in old:
        pattern = pattern.replace("WAY:scorer", "WAY:check") if way == "refine" else pattern
        option, _, rest = pattern.replace("WAY", way or ("score" if "scorer" in pattern else "vote")).partition(" ")
        if option == "--method":
            method, _, key = (rest + ("" if rest.endswith("=") else value)).partition(":")
            quoted = f'"{value}"' if _SPLITS.search(value) else value
            methods.setdefault(method, []).extend([key + quoted if key.endswith("=") else key] if key else [])
        elif pattern.endswith(("=", ":", " ")):
            others.append(f"{option} {quote(rest + value)}")
        else:
            others.append(pattern.replace("FILE", quote(value)))
    others += [f"--method {quote(':'.join(filter(None, (name, ','.join(methods[name])))))}" for name in methods]
    return f"for {' '.join(typed)} write {' '.join(others)}" if old else ""


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
