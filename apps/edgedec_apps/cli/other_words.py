"""The words of llama.cpp and ollama, and edgedec's earlier ones: an error names what is typed here for the same."""

import re
from collections.abc import Collection, Iterable, Sequence
from shlex import quote


def table(text: str) -> dict[str, str]:
    """Return by each word of a line what stands behind its arrow."""
    rows = [line.partition(" > ") for line in text.strip().splitlines()]
    return {word: new for old, _, new in rows for word in old.split()}


OPTIONS = table("""
--temp > --temperature
--ctx-size --n-ctx --num-ctx --max-seq-len > --context
--n-predict --predict --num-predict > --max-tokens
-m --model -hf -hfr --hf-repo > the model's name as the first argument
-p --prompt > the prompt as the argument behind the model's name
-ngl --n-gpu-layers --num-gpu > --gpu-layers
-sys --system-prompt > --system
-sysf --system-prompt-file > --system "$(cat FILE)"
-r --reverse-prompt > --stop
-ctk -ctv --cache-type-k --cache-type-v > --kv-type
-fa --flash-attn > --runtime-option flash_attention=yes
-np --n-parallel > --parallel
--ignore-eos > --method ignore-end
--no-context-shift --context-shift > --method slide
-j --json-schema-file --format > --json-schema
--chat-template-file > --chat-template
--n-threads --num-thread > --threads
--keepalive > --keep-alive
-cnv --conversation -i --interactive > edgedec chat
--embedding --embeddings > edgedec embed
""")
"""What is typed here for an option of theirs: an option, a command, or where the value stands."""

COMMANDS = table("""
server llama-server start > serve
cli llama-cli generate completion llama-completion > run
remove delete > rm
download get fetch > pull
llama-bench > bench
perplexity llama-perplexity > eval
quantize llama-quantize convert > export
embedding llama-embedding > embed
models tags > list
cp copy > create
llama-gguf inspect > info
version > --version
help > --help
""")
"""The command here for a command of theirs."""

MOVED = table("""
--draft-head > --draft-option head=VALUE
--draft-max --draft-n --spec-draft-n-max > --draft-option max=VALUE
--draft-model -md --model-draft > --draft-option model=VALUE
--draft-numerics > --draft-option numerics=VALUE
--draft-overlap > --draft-option overlap=yes
--draft-store > --draft-option store=VALUE
--draft-tree > --draft-option tree=VALUE
--verify > --draft-option rule=VALUE
--frequency-penalty > --penalty frequency=VALUE
--presence-penalty > --penalty presence=VALUE
--repetition-penalty --repeat-penalty > --penalty repetition=VALUE
--penalty-last-n --repeat-last-n > --penalty last-n=VALUE
--choose --search > --method VALUE
--refine > --method refine:n=VALUE
--refine-seconds > --method refine:seconds=VALUE
--refine-tokens > --method refine:tokens=VALUE
--answer > --method WAY:answer=VALUE
--scorer > --method WAY:scorer=VALUE
--scorer-seconds > --method WAY:scorer-seconds=VALUE
--embedding-model > --method passages:model=VALUE
--passages > --method passages:n=VALUE
--mmproj > --method pictures:projector=VALUE
--image-max-tokens > --method pictures:max-tokens=VALUE
--denoise > --method diffusion:denoise=VALUE
--layer-skip > --method layer-skip:speedup=VALUE
--layer-skip-force > --method layer-skip:force=yes
--prompt-keep > --method prompt-keep:keep=VALUE
--prompt-keep-model > --method prompt-keep:model=VALUE
--small-model > --method switching:small-model=VALUE
--entropy > --method switching:entropy=VALUE
--entropy-force > --method switching:entropy-force=yes
--momentum > --method momentum:VALUE
--stop-unsure > --method stop-unsure:VALUE
--ignore-end > --method ignore-end
--json-close > --method json-close
--slide > --method slide
--explain-all > --explain --verbose
--gpu-memory > --gpu-layers VALUE
--history > edgedec chat --history
--no-history > edgedec chat --no-history
--regex > --grammar regex:VALUE
--system-file > --system "$(cat VALUE)"
""")
"""What is typed for an option that went, or for one of theirs with the same value.

WAY stands for the name behind --search or --choose, or for refine; else it is vote beside --answer, and score.
"""
_SPLITS = re.compile(r",[a-z][\w-]*=")
_WAYS = {"--search": "", "--choose": "", "--refine": "refine"}


def moved(words: Sequence[str], flags: Collection[str]) -> str:
    """Return what to type in place of the options that no longer exist, with their values; "" where there are none.

    >>> moved(["m", "--draft-tree", "4x2", "--slide"], ["--draft"])
    'for --draft-tree 4x2 --slide write --draft-option tree=4x2 --method slide'
    >>> moved(["m", "--entropy=1", "--small-model", "a b"], [])
    "for --entropy=1 --small-model 'a b' write --method switching:entropy=1 --method 'switching:small-model=a b'"
    >>> moved(["m", "--refine", "2", "--scorer", "./check -x"], [])
    "for --refine 2 --scorer './check -x' write --method refine:n=2 --method 'refine:check=./check -x'"
    """
    typed, old, way = list[str](), list[tuple[str, str]](), ""
    places = iter(range(len(words)))
    for place in places:
        name, sign, value = words[place].partition("=")
        if name not in MOVED or name in flags:
            continue
        typed.append(name + (f"={quote(value)}" if sign else ""))
        if not sign and "VALUE" in MOVED[name] and place + 1 < len(words):
            value = words[next(places)]
            typed.append(quote(value))
        if name in _WAYS:
            way = _WAYS[name] or value.partition(":")[0]
        old.append((MOVED[name], value))
    return f"for {' '.join(typed)} write {' '.join(_spelled(*each, way) for each in old)}" if old else ""


def _spelled(pattern: str, value: str, way: str) -> str:
    """Return the new spelling of an option with its value, by its pattern in MOVED."""
    if '"' in pattern:
        return pattern.replace("VALUE", quote(value))
    option, _, rest = pattern.partition(" ")
    rest = rest.replace("WAY", way or ("score" if "scorer" in rest else "vote"))
    rest = rest.replace("refine:scorer", "refine:check")
    if "VALUE" not in rest:
        return f"{option} {rest}"
    key, inner = rest.removesuffix("VALUE"), f'"{value}"' if _SPLITS.search(value) and ":" in rest else value
    return f"{option} {quote(key + inner)}"


def own_words(words: Iterable[str], *, options: Iterable[str], commands: bool) -> str:
    """Return what edgedec calls the first of these words that is llama.cpp's or ollama's; "" where none is.

    Args:
        words: What was typed.
        options: The options that the command has: they mean what they mean here.
        commands: Whether the first word should have been a command.

    >>> own_words(["qwen3-4b", "--temp", "0.2"], options=["--temperature"], commands=False)
    'for --temp write --temperature'
    >>> own_words(["--temperature=1"], options=["--temperature"], commands=False)
    ''
    >>> own_words(["llama-server"], options=[], commands=True)
    'for llama-server write edgedec serve'
    """
    table = {word: f"edgedec {edgedec_word}" for word, edgedec_word in COMMANDS.items()} if commands else OPTIONS
    meant = set(options)
    for word in words:
        name = word.partition("=")[0]
        if name in table and name not in meant:
            return f"for {name} write {table[name]}"
    return ""
