"""Coverage-guided fuzzing of what reads the bytes of strangers: a result or an EdgedecError must come out, in time.

    python benchmarks/fuzz/guided.py gguf --runs 1000000     one target, until it has run so often
    python benchmarks/fuzz/guided.py all --seconds 60        every target in turn, 60 s in all
    python benchmarks/fuzz/guided.py gguf FILE               an input that was kept, once more

Python's parsers run under atheris (`pip install atheris`); the native targets (tiles, model, adapter, kept, head) are
native_fuzz.cpp with libFuzzer, address and undefined-behaviour sanitizers, which this program compiles first (clang and
CMake; `--build DIRECTORY` keeps what is compiled). Seeds are made here, inputs that reach new code are kept in
`--corpus DIRECTORY`, and a finding ends the target with status 1 and is kept as a file. A finding is any exception but
EdgedecError, a fault that a sanitizer sees, more than 10 s, or more than 2 GB. The last line is JSON: how many inputs
each target took, how many places of the code they reached, and the status it ended with.
"""

import argparse
import functools
import importlib
import json
import math
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

NATIVE = ("tiles", "model", "adapter", "kept", "head")
LIMITS = ("-timeout=10", "-rss_limit_mb=2048", "-len_control=0", "-print_final_stats=1")
QUICK = ("-entropic=0", "-reload=0")  # weighing a corpus of thousands of inputs takes a third of the time
SANITIZERS = "detect_leaks=1:allocator_may_return_null=1:malloc_context_size=1:quarantine_size_mb=8"
FLAGS = "-O2 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=address,undefined"

Read = Callable[[bytes], object]


def _folder() -> Path:
    """Return a new folder in memory where the system has one: a fuzzer writes a file for each input."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="edgedec-fuzz-", dir=shared if shared.is_dir() else None))


def _of_file(name: str, read: Callable[[Path], object]) -> Read:
    """Return a function of bytes that writes them to a file of this name, and reads that."""
    path = _folder() / name

    def of_bytes(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return of_bytes


def gguf() -> tuple[Read, list[bytes]]:
    """Headers and metadata of models, as the first command with a file reads them."""
    from fuzz_bases import header_sources
    from fuzz_gguf import exercise
    from support.models.gguf_writer import build_gguf

    return _of_file("m.gguf", exercise), [build_gguf(s.metadata, s.tensors).data for s in header_sources()]


def projectors() -> tuple[Read, list[bytes]]:
    """Headers of projectors."""
    from support.models.gguf_writer import build_gguf
    from support.models.siglip_files import siglip_parts

    from edgedec_runtimes.pictures.header import read_projector

    parts = [siglip_parts(kind, n_layer=1, image_size=16, n_ff=32, n_out=32) for kind in ("gemma3", "idefics3", "lfm2")]
    seeds = [build_gguf(metadata, tensors).data for metadata, tensors in parts]
    return _of_file("p.gguf", read_projector), seeds


def heads() -> tuple[Read, list[bytes]]:
    """GGUFs of draft heads, and their safetensors: the first byte says which."""
    from fuzz_heads import gguf_heads
    from support.heads.head_mutants import sound_heads
    from support.models.gguf_writer import build_gguf

    from edgedec_runtimes.trained_heads.load import load_head

    folder, of_gguf = _folder(), _of_file("h.gguf", load_head)
    sound = sound_heads()

    def read(data: bytes) -> object:
        if data[:1] == b"G":
            return of_gguf(data)
        for name, content in sound[data[0] % len(sound) if data else 0].files.items():
            (folder / name).write_bytes(data[2:] if name.startswith(("config", "model")[data[1:2] > b"m"]) else content)
        return load_head(folder)

    seeds = [build_gguf(source.metadata, source.tensors).data for source in gguf_heads()]
    for i, head in enumerate(sound[:3]):
        seeds += [bytes([i]) + b"a" + head.files["config.json"], bytes([i]) + b"z" + head.files["model.safetensors"]]
    return read, seeds


def adapters() -> tuple[Read, list[bytes]]:
    """LoRA adapters, against a model that is there."""
    from support.models.tiny_adapters import tiny_adapter
    from support.models.tiny_models import tiny_llama

    from edgedec.gguf.file import read_gguf
    from edgedec_runtimes.weights.adapters import load_adapters

    folder = _folder()
    base = tiny_llama(folder / "base.gguf")
    model = read_gguf(base)
    seeds = [tiny_adapter(folder / "a.gguf", base, rank=1, matrices=("attn_q",)).read_bytes()]
    return _of_file("l.gguf", lambda path: load_adapters([path], model)), seeds


def tokenizers() -> tuple[Read, list[bytes]]:
    """Vocabularies of all kinds, and texts in them."""
    from support.models import vocabularies
    from support.models.gguf_writer import write_gguf

    from edgedec.gguf.file import read_gguf
    from edgedec_runtimes.tokenizer import open_tokenizer
    from edgedec_runtimes.tokenizer.pretokenizers import _CUTS

    path, names = _folder() / "v.gguf", sorted(_CUTS)

    def read(data: bytes) -> None:
        import atheris

        given = atheris.FuzzedDataProvider(data)
        model = given.PickValueInList(["gpt2", "llama", "gemma4"])
        tokens = [given.ConsumeUnicode(given.ConsumeIntInRange(0, 6)) for _ in range(given.ConsumeIntInRange(1, 40))]
        tokens = [token.encode(errors="replace").decode() for token in tokens]
        if given.ConsumeBool():
            tokens = [*dict.fromkeys(tokens), *(f"<0x{byte:02X}>" for byte in range(256))]
        metadata: dict[str, Any] = {
            "general.architecture": "llama",
            "tokenizer.ggml.model": model,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [given.PickValueInList([1, 1, 1, 3, 4, 6, 2, 9]) for _ in tokens],
            "tokenizer.ggml.scores": [given.ConsumeFloatInRange(-1e9, 1e9) for _ in tokens],
        }
        if model != "llama":
            n_merges = given.ConsumeIntInRange(0, 20)
            pick = functools.partial(given.PickValueInList, tokens)
            metadata["tokenizer.ggml.merges"] = [f"{pick()} {pick()}" for _ in range(n_merges)]
            metadata["tokenizer.ggml.pre"] = given.PickValueInList(names)
        for key in ("bos_token_id", "eos_token_id", "eot_token_id", "fim_pre_token_id"):
            if given.ConsumeBool():
                metadata[f"tokenizer.ggml.{key}"] = given.ConsumeIntInRange(-2, len(tokens))
        for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
            if given.ConsumeBool():
                metadata[f"tokenizer.ggml.{key}"] = given.ConsumeBool()
        tokenizer = open_tokenizer(read_gguf(write_gguf(path, metadata)))
        special = given.ConsumeBool()
        text = given.ConsumeUnicode(60)
        ids = tokenizer.encode(text, add_special=given.ConsumeBool(), parse_special=special)
        assert all(0 <= i < len(tokens) for i in ids), (ids, len(tokens))
        tokenizer.decode(ids)

    texts = [" ".join(map(str, vocabularies.bpe()["tokenizer.ggml.tokens"][:200])).encode()]
    return read, [bytes(range(256)) * 2, bytes(600), texts[0], texts[0][::-1]]


def templates() -> tuple[Read, list[bytes]]:
    """Chat templates, each rendering a chat with a tool's call and its result."""
    from edgedec_runtimes.chat.template import ChatTemplate

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None, "\u20ac"]}}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    def read(data: bytes) -> None:
        template = ChatTemplate(data.decode(errors="replace"), bos_token="<s>", eos_token="</s>")
        len(template.variables)
        template.render(chat, tools=tools, enable_thinking=False)

    seeds = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
        "{%- set n = namespace(i=0) %}{% macro f(x) -%}{{ x|upper }}{%- endmacro %}{{ f('a') }}{% set n.i = n.i + 1 %}",
        "{% if tools %}{{ tools | tojson(indent=2) }}{% elif x %}{{ raise_exception(1) }}{% endif %}",
        "{% for m in messages if m.role %}{{ loop.index0 ~ m.content.split('>')[-1] }}{% break %}{% endfor %}",
        "{{ messages[-1:] | selectattr('role', 'eq', 'tool') | map(attribute='content') | join(', ') }}{{ '%s' % 1 }}",
        "{% for k, v in messages[2].tool_calls[0].function.arguments.items() %}{{ k }}={{ v[::-1] }}{% endfor %}",
        "{{ strftime_now('%Y') }}{{ range(3) | list }}{% generation %}{{ 2 ** 3 // 2 }}{% endgeneration %}{# c #}",
    )
    return read, [seed.encode() for seed in seeds]


def gbnf() -> tuple[Read, list[bytes]]:
    """GBNF grammars, as Lark."""
    from edgedec.grammar import Grammar
    from edgedec_runtimes.grammar.gbnf_lark import lark_of_gbnf
    from edgedec_runtimes.grammar.limits import require_modest

    def read(data: bytes) -> None:
        source = data.decode(errors="replace")
        require_modest(Grammar("gbnf", source))
        lark_of_gbnf(source)

    seeds = (
        'root ::= object # c\nobject ::= "{" ws ( pair ("," pair)* )? "}" ws\npair ::= "\\"a\\"" ":" ws\nws ::= [ ]*',
        'root ::= ("a" | [^\\x7F\\u20ac-\\U0001f642]){2,5} b+ .\nb ::= "x"?\n',
        "root ::= a{3} | b{,4} |\n  c\na ::= [a-z]\nb ::= [\\]\\-]\nc ::= root",
    )
    return read, [seed.encode() for seed in seeds]


def schemas() -> tuple[Read, list[bytes]]:
    """JSON schemas, rewritten and measured before llguidance sees them: texts, and objects drawn from the bytes."""
    from edgedec.grammar import Grammar
    from edgedec_runtimes.grammar.certain import schema_bytes
    from edgedec_runtimes.grammar.exact_numbers import lark_of_inexact
    from edgedec_runtimes.grammar.limits import require_modest
    from edgedec_runtimes.grammar.rewriting import other_words

    scalars = (None, True, False, 0, 1, -1, 2.5, 10**30, 123456789.12345679, *("a", "object", "#", "#/$defs/a", "^a$"))

    def drawn(draw: Any, depth: int) -> Any:
        form = draw.ConsumeIntInRange(0, 5) if depth else 0
        if form == 0:
            return draw.PickValueInList([*scalars])
        n = draw.ConsumeIntInRange(0, 3)
        if form == 1:
            return [drawn(draw, depth - 1) for _ in range(n)]
        keys = ["a", "b"] if form == 2 else keywords
        return {draw.PickValueInList(keys): drawn(draw, depth - 1) for _ in range(n)}

    def read(data: bytes) -> None:
        try:
            if data[:1] == b"\0":
                import atheris

                schema = drawn(atheris.FuzzedDataProvider(data[1:]), 4)
            else:
                schema = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(schema, dict):
            return
        grammar = Grammar("json_schema", json.dumps(schema))
        require_modest(grammar)
        lark_of_inexact(grammar.source, {})
        if (words := other_words(grammar, 10**6)) is not None:
            schema_bytes(json.loads(words[0].source))

    seeds: tuple[dict[str, Any], ...] = (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x"}},
            "required": ["a"],
            "$defs": {"x": {"enum": [1]}},
        },
        {"not": {"const": 2}, "type": ["integer", "null"], "minimum": -3, "exclusiveMaximum": 1e9, "multipleOf": 0.5},
        {
            "if": {"required": ["b"]},
            "then": {"minProperties": 2},
            "else": {"oneOf": [{"type": "string"}, {"const": {}}]},
        },
        {"type": "array", "items": {"pattern": "^[a-z]+$", "format": "date"}, "uniqueItems": True, "contains": {}},
        {
            "allOf": [{"dependentSchemas": {"a": {"maxLength": 3}}}, {"propertyNames": {"enum": ["a"]}}],
            "additionalProperties": False,
        },
    )
    texts = [json.dumps(seed) for seed in seeds]
    keywords = [*dict.fromkeys(re.findall(r'"([^"]+)":', "".join(texts))), *("prefixItems", "dependentRequired")]
    return read, [*map(str.encode, texts), *(b"\0" + random.Random(i).randbytes(200) for i in range(9))]


def bodies() -> tuple[Read, list[bytes]]:
    """Bodies of the interfaces, read as requests; the first byte says which."""
    from support.models.saying_model import saying_model

    import edgedec
    from edgedec_apps.server.anthropic.api import read_message
    from edgedec_apps.server.core.bodies import parse_object
    from edgedec_apps.server.core.budget import MemoryBudget
    from edgedec_apps.server.core.fields import Fields
    from edgedec_apps.server.ollama import api as ollama
    from edgedec_apps.server.openai import requests as openai
    from edgedec_apps.server.openai.response_store import ResponseStore
    from edgedec_apps.server.openai.responses import read_response

    sys.path.insert(0, str(ROOT / "tests" / "apps" / "server"))
    of_tests = importlib.import_module("test_fuzz")
    path = saying_model(_folder() / "says.gguf", of_tests.SAYS, chat_template=of_tests.TEMPLATE)
    engine = edgedec.load(path, n_ctx=64, runtime="reference", draft="off")

    def ollama_of(read: Callable[[Fields, dict[str, Any], edgedec.Engine], object]) -> Callable[[Fields], object]:
        return lambda fields: read(fields, ollama.read_options(fields)[0], engine)

    readers: dict[str, Callable[[Fields], object]] = {
        "/v1/chat/completions": lambda fields: openai.read_chat(fields, engine),
        "/v1/completions": lambda fields: openai.read_completion(fields, engine),
        "/v1/responses": lambda fields: read_response(fields, engine, ResponseStore(MemoryBudget(2**20))),
        "/v1/messages": lambda fields: read_message(fields, engine),
        "/api/chat": ollama_of(ollama.read_chat),
        "/api/generate": ollama_of(ollama.read_generate),
    }

    def read(data: bytes) -> None:
        [*readers.values()][data[0] % len(readers) if data else 0](Fields(parse_object(data[1:])))

    return read, [bytes([i]) + json.dumps(of_tests.BODIES[name]).encode() for i, name in enumerate(readers)]


def presets() -> tuple[Read, list[bytes]]:
    """Files of presets."""
    folder = _folder()
    os.environ["EDGEDEC_CONFIG"] = str(folder)
    from edgedec_models.presets import find_preset

    path = folder / "presets" / "p.toml"
    path.parent.mkdir()

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return find_preset("p")

    seed = (
        'model = "smollm2-135m"\nsystem = """a\nb"""\n[options]\ntemperature = 0.5\nstop = ["x"]\nseed = 1979-05-27\n'
    )
    return read, [seed.encode()]


PYTHON: dict[str, Callable[[], tuple[Read, list[bytes]]]] = {
    "gguf": gguf,
    "projectors": projectors,
    "heads": heads,
    "adapters": adapters,
    "tokenizers": tokenizers,
    "templates": templates,
    "gbnf": gbnf,
    "schemas": schemas,
    "bodies": bodies,
    "presets": presets,
}


def fuzz_python(name: str, arguments: list[str], corpus: Path) -> None:
    """Fuzz one of Python's parsers in this process, which libFuzzer ends."""
    import atheris

    sys.meta_path.insert(0, PathFinder)  # atheris traces nothing of what an editable installation's finder loads
    with atheris.instrument_imports(include=["edgedec", "edgedec_runtimes", "edgedec_models", "edgedec_apps"]):
        from edgedec.errors import EdgedecError

        read, seeds = PYTHON[name]()

        def one(data: bytes) -> None:
            try:
                read(data)
            except EdgedecError as error:
                str(error)

        for i, seed in enumerate(seeds):
            (corpus / f"seed-{i}").write_bytes(seed)
            one(seed)  # imports what is imported late, so that it is traced

    atheris.Setup(["fuzz", *arguments], one)
    atheris.Fuzz()


def build_native(folder: Path, *, all_kernels: bool) -> Path:
    """Compile the library and native_fuzz.cpp with sanitizers below a folder; return the program.

    Kernels are the portable ones, or those of each instruction set of this processor's family, which take minutes.
    """
    clang, native = os.environ.get("FUZZ_CXX", "clang++"), ROOT / "runtimes/edgedec_runtimes/cpu/native"
    program, library = folder / "native_fuzz", folder / "runtimes/edgedec_runtimes/cpu/native"
    source, ignored = Path(__file__).with_name("native_fuzz.cpp"), Path(__file__).with_name("kernels.ignore")
    flags = (
        f"{FLAGS} -fsanitize=fuzzer-no-link -fno-sanitize-coverage=trace-cmp "  # inputs have no magic numbers to find
        f"-fsanitize-coverage-ignorelist={ignored} -fsanitize-ignorelist={ignored}"
    )
    define = ["-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_COMPILER={clang}", f"-DCMAKE_CXX_FLAGS={flags}"]
    if not all_kernels:  # a processor of no known family has no others
        define += [f"-DCMAKE_SYSTEM_NAME={platform.system()}", "-DCMAKE_SYSTEM_PROCESSOR=any"]
    commands = [
        ["cmake", "-S", str(ROOT), "-B", str(folder), *define],
        ["cmake", "--build", str(folder), "--parallel", "2"],
        [clang, "-std=c++17", *FLAGS.split(), "-fsanitize=fuzzer", f"-I{native}", str(source), "-o", str(program)],
    ]
    commands[-1] += [f"-I{library}/tables", f"-L{library}", f"-Wl,-rpath,{library}", "-ledgedec_cpu"]
    for command in commands:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-3000:]}\n{' '.join(command)} ended with {done.returncode}")
    return program


def fuzz(
    name: str, runs: int, seed: int, seconds: float, corpus: Path, program: Path | None, files: list[str]
) -> dict[str, Any]:
    """Fuzz one target in a process of its own; return how many inputs it took, and its status."""
    kept = corpus / name
    kept.mkdir(parents=True, exist_ok=True)
    if program is not None:  # sizes and bytes are drawn from the input, so that any input is a seed
        rng = random.Random(name)
        for i in range(30):
            (kept / f"seed-{i}").write_bytes(rng.randbytes(rng.choice((256, 1024, 3000))))
    limits = [*LIMITS, *QUICK, f"-runs={runs}", f"-seed={seed}", f"-max_total_time={math.ceil(seconds)}"]
    longest = 512 if name in ("templates", "gbnf") else 4096  # bytes: 4,096 of a template or grammar take 0.1 s
    limits += [f"-max_len={longest}", f"-artifact_prefix={corpus.resolve()}/finding-{name}-"]
    environment = os.environ | {"FUZZ": name, "ASAN_OPTIONS": SANITIZERS}
    command = [str(program)] if program else [sys.executable, __file__, name, "--here", "--corpus", str(kept)]
    command += [*limits, *(files or [str(kept)])]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace")
    reached = re.search(r"^of \d+ inputs: .*", done.stderr, re.M)
    counts = {"inputs": r"number_of_executed_units: (\d+)", "covered": r" cov: (\d+)"}
    result = {key: int([0, *re.findall(count, done.stderr)][-1]) for key, count in counts.items()}
    result["status"] = done.returncode
    print(f"{name}: {result} {reached[0] if reached else ''}", file=sys.stderr)
    if not (files or done.returncode or result["covered"]):
        raise SystemExit(f"{name}: no input reached code that is traced, so nothing guided the fuzzer")
    if done.returncode:
        print(done.stderr[-6000:], file=sys.stderr)
    return result


def main() -> int:
    """Parse the command line, fuzz, print one line of JSON; 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["all", "python", "native", *PYTHON, *NATIVE])
    parser.add_argument("files", nargs="*", help="inputs to try once, in place of fuzzing")
    parser.add_argument("--runs", type=int, default=-1, help="inputs of each target (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default: another one each time)")
    parser.add_argument("--seconds", type=float, default=0, help="time of all targets together (default: no limit)")
    parser.add_argument("--corpus", type=Path, help="where inputs and findings are kept (default: a new folder)")
    parser.add_argument("--build", type=Path, help="where the native targets are compiled (default: below the corpus)")
    parser.add_argument("--all-kernels", action="store_true", help="not the portable kernels alone; takes minutes more")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options, of_fuzzer = parser.parse_known_args()
    if options.here:
        fuzz_python(options.target, [*of_fuzzer, *options.files], options.corpus)
        return 0
    if of_fuzzer:
        parser.error(f"unknown: {' '.join(of_fuzzer)}")
    corpus = options.corpus or Path(tempfile.mkdtemp(prefix="fuzz-corpus-"))
    groups = {"all": (*PYTHON, *NATIVE), "python": tuple(PYTHON), "native": NATIVE}
    names = groups.get(options.target, (options.target,))
    native = [name for name in names if name in NATIVE]
    program = build_native(options.build or corpus / "build", all_kernels=options.all_kernels) if native else None
    found = {}
    for name in names:
        share, files = options.seconds / len(names), options.files
        found[name] = fuzz(name, options.runs, options.seed, share, corpus, program if name in NATIVE else None, files)
    print(json.dumps(found))
    return int(any(result["status"] for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
