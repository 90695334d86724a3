"""Record the bits of texts and logits on the cpu runtime, and compare them with an earlier recording.

    python benchmarks/texts/same_bits.py ~/.cache/edgedec/models/smollm2-135m.gguf --tiny --out before.json
    python benchmarks/texts/same_bits.py ~/.cache/edgedec/models/smollm2-135m.gguf --tiny --compare before.json

A recording has a hash for each text (the token ids, greedy and at a temperature, with each kind of drafts) and, for
each prompt, for the logits of its prefill, of single steps along the greedy text, of a tree and the step after it, and
of rows that leave a layer out. Every instruction set has a process of its own. --tiny adds a random model of every
architecture that the tests have. The exit code is 1 where something of the earlier recording differs or is absent.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet, Model, Session
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, BenchPrompt, prepare, read_prompts
from edgedec_apps.bench.provenance import provenance
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu

Hashes = dict[str, str]
TEMPERATURES = (0.0, 0.8)
TINY_TYPES = ("Q4_K", "Q6_K", "Q8_0", "F16")
TINY_CHARACTERS, TINY_TOKENS, TINY_PROMPTS = 120, 24, 2
_CHUNK = 48
_TREE = np.array([-1, 0, 0, 2, 1], np.int32)
_PATH = np.array([0, 2, 3], np.int32)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to record of a model.

    Attributes:
        path: The model's file.
        prompts: The prompts.
        drafts: Kinds of drafts, as `draft=` of edgedec.load takes them; the first one's texts lead the logits.
        n_tokens: Tokens of a text.
        n_ctx: Tokens of the context.
    """

    path: Path
    prompts: list[BenchPrompt]
    drafts: list[str]
    n_tokens: int
    n_ctx: int


def hashed(*arrays: NDArray[Any]) -> str:
    """Return a hash of the arrays' bytes, in their order."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:32]


def record(wanted: Wanted, cache: Path) -> Hashes:
    """Return the hashes of a model's texts and logits, by what they are of."""
    hashes: Hashes = {}
    greedy: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for draft in wanted.drafts:
        options: dict[str, Any] = {"runtime": "cpu", "offline": True, "cache_dir": cache, "n_ctx": wanted.n_ctx}
        with edgedec.load(wanted.path, draft=draft, **options) as engine:
            for request in prepare(engine, wanted.prompts, wanted.n_tokens):
                hashes[f"{request.id}, its prompt"] = hashed(np.array(request.token_ids, np.int32))
                for t in TEMPERATURES:
                    text = engine.generate(
                        request.token_ids, max_tokens=wanted.n_tokens, temperature=t, seed=request.seed
                    )
                    hashes[f"{request.id}, draft {draft}, temperature {t}"] = hashed(np.array(text.token_ids, np.int32))
                    if t == 0.0:
                        greedy.setdefault(request.id, (request.token_ids, text.token_ids))
    with Cpu().load(wanted.path, LoadOptions(n_ctx=wanted.n_ctx, max_rows=_CHUNK, cache_dir=cache)) as model:
        for prompt_id, (prompt, answer) in greedy.items():
            of_prompt = logits(model, wanted.n_ctx, np.array(prompt, np.int32), np.array(answer, np.int32))
            hashes |= {f"{prompt_id}, logits {name}": value for name, value in of_prompt}
    return hashes


def logits(model: Model, n_ctx: int, prompt: NDArray[np.int32], answer: NDArray[np.int32]) -> Iterator[tuple[str, str]]:
    """Yield names and hashes of the logits along a text."""
    session = model.session(n_ctx)
    read = range(0, len(prompt), _CHUNK)
    yield "of the prompt", hashed(*(copied(session, prompt[i : i + _CHUNK], n_past=i, rows="all") for i in read))
    n_past = len(prompt)
    yield "of steps", hashed(*(copied(session, answer[i : i + 1], n_past=n_past + i) for i in range(len(answer))))
    if model.capabilities.trees:
        session = read_again(model, n_ctx, prompt)
        tree = copied(session, np.resize(prompt, len(_TREE)), n_past=n_past, parents=_TREE, rows="all")
        session.keep(_PATH)
        step = copied(session, prompt[:1], n_past=n_past + len(_PATH))
        yield "of a tree and the step after it", hashed(tree, step)
    n_layer = model.card.n_layer
    if model.capabilities.layers and n_layer > 1:
        session = read_again(model, n_ctx, prompt)
        fewer = LayerSet.of(n_layer, [layer for layer in range(n_layer) if layer != n_layer // 2])
        yield "without a layer", hashed(copied(session, np.resize(prompt, 4), n_past=n_past, layers=fewer, rows="all"))
    session.close()


def copied(session: Session, tokens: NDArray[np.int32], **options: Any) -> NDArray[np.float32]:
    """Return the logits of a forward as an array that later forwards leave alone."""
    return session.forward(tokens, **options).logits.copy()


def read_again(model: Model, n_ctx: int, prompt: NDArray[np.int32]) -> Session:
    """Return a new session that has read a prompt."""
    session = model.session(n_ctx)
    session.forward(prompt, n_past=0)
    return session


def record_all(args: argparse.Namespace) -> dict[str, Hashes]:
    """Return the hashes of all models on this process's instruction set, by model."""
    prompts = read_prompts(args.prompts, args.per_task)
    found: dict[str, Hashes] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        for path in args.models:
            print(f"  {path.name}", file=sys.stderr)
            found[path.name] = record(Wanted(path, prompts, args.drafts, args.max_tokens, args.context), cache)
        if args.tiny:
            print("  tiny models", file=sys.stderr)
            short = [replace(prompt, text=prompt.text[:TINY_CHARACTERS]) for prompt in prompts[:TINY_PROMPTS]]
            for name, tiny in ARCHITECTURES.items():
                path = write_tiny(Path(folder, f"{name}.gguf"), replace(tiny, types=TINY_TYPES))
                found[f"tiny {name}"] = record(Wanted(path, short, args.drafts, TINY_TOKENS, 256), cache)
    return found


def record_on(isa: str) -> dict[str, Hashes]:
    """Return what a process of its own records on an instruction set, with the arguments of this one."""
    print(isa, file=sys.stderr)
    command = [sys.executable, __file__, *sys.argv[1:], "--here"]
    done = subprocess.run(command, env=os.environ | {"EDGEDEC_CPU_ISA": isa}, stdout=subprocess.PIPE, check=True)
    found: dict[str, Hashes] = json.loads(done.stdout)
    return found


def differences(before: dict[str, Any], after: dict[str, Any], within: str = "") -> list[str]:
    """Return the names of what differs from an earlier recording, or is absent from this one.

    >>> differences({"avx2": {"a": "1", "b": "2"}}, {"avx2": {"a": "1", "b": "3", "c": "4"}, "sse": {}})
    ['avx2, b: differs']
    """
    found = []
    for name, value in before.items():
        if name not in after:
            found.append(f"{within}{name}: not in this recording")
        elif isinstance(value, dict):
            found += differences(value, after[name], f"{within}{name}, ")
        elif value != after[name]:
            found.append(f"{within}{name}: differs")
    return found


def main() -> None:
    """Record, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files")
    parser.add_argument("--tiny", action="store_true", help="add a random tiny model of every architecture")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int, default=3, help="prompts of every task (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--drafts", nargs="+", default=["off", "auto"], help="kinds of drafts (default: off auto)")
    parser.add_argument("--isa", nargs="+", help="instruction sets (default: the best and avx2, where they differ)")
    parser.add_argument("--out", type=Path, help="write the recording to this file")
    parser.add_argument("--compare", type=Path, help="an earlier recording")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in a process of one instruction set
    args = parser.parse_args()
    if not args.models and not args.tiny:
        parser.error("name a model's file, or use --tiny")
    if args.here:
        print(json.dumps(record_all(args)))
        return
    made_by = provenance()  # before the checkout can change
    available = instruction_sets()
    sets = args.isa or dict.fromkeys((available[0], "avx2" if "avx2" in available else available[-1]))
    hashes = {isa: record_on(isa) for isa in sets}
    n_hashes = sum(len(model) for models in hashes.values() for model in models.values())
    settings = {"drafts": args.drafts, "per_task": args.per_task, "max_tokens": args.max_tokens}
    document = {"benchmark": "same_bits"} | settings | {"hashes": hashes} | made_by
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    different: list[str] = []
    if args.compare is not None:
        different = differences(json.loads(args.compare.read_text(encoding="utf-8"))["hashes"], hashes)
        print("\n".join(different) or f"equal to {args.compare}")
    line = {"n_instruction_sets": len(hashes), "n_hashes": n_hashes, "n_different": len(different)}
    print(json.dumps({"benchmark": "same_bits"} | settings | line | made_by))
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
