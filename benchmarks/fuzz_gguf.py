"""Damage GGUF headers at random and see that nothing but an answer or an EdgedecError comes out, soon and small.

    python benchmarks/fuzz_gguf.py --count 20000 --seed 1 --keep findings/

Mutated: the tests' tiny models and, where it is installed, the header of SmolLM2 135M with its tokenizer cut short.
Each mutant is read, described, checked for a text decoder, its arrays decoded and its tensors read. A finding is any
other exception, more than 1 s, or more memory than LIMIT_BYTES above the start. Findings are kept as files.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.gguf_writer import Built, RawTensor, Typed, build_gguf, tiny_text_model
from support.real_models import models_dir

from edgedec.errors import EdgedecError
from edgedec.gguf import GGUFArray, ValueType, read_gguf
from edgedec.model_info import describe, kv_cache_bytes, require_text_decoder

LIMIT_S = 1.0
LIMIT_BYTES = 128 * 2**20
MAX_ARRAY = 40


@dataclass(frozen=True, slots=True)
class Source:
    """A model as the writer takes it."""

    metadata: dict[str, Any]
    tensors: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One mutant that was not handled, kept under `file`."""

    error: str
    seconds: float
    file: str


class TooSlow(BaseException):
    """Raised by the alarm; no Exception, so that nothing in the code under test takes it for one of its own."""


def sources() -> list[Source]:
    """Return the sound models to damage."""
    metadata, tensors = tiny_text_model()
    odd = {
        "general.alignment": 64,
        "nested": [[1, 2], ["x", "yz"], [[True], []]],
        "wide": Typed(ValueType.UINT64, 2**40),
        "double": Typed(ValueType.FLOAT64, 0.1),
        "bytes": np.arange(20, dtype=np.uint8),
        "flags": [True, False, True],
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 40,
        "llama.pooling_type": 0,
        "llama.vocab_size": 5,
        "llama.full_attention_interval": 2,
        "llama.attention.causal": True,
        "llama.attention.key_length": 2,
        "llama.attention.sliding_window": 16,
        "llama.attention.recurrent_layers": [True, False],
    }
    split = {"split.no": 0, "split.count": 1, "split.tensors.count": 5}
    found = [
        Source(metadata, tensors),
        Source(metadata | odd, tensors),
        Source(metadata | split, tensors),
        Source({"general.architecture": "llama"}, {}),
    ]
    real = models_dir() / "smollm2-135m.gguf"
    if real.is_file():
        found.append(cut_down(real))
    return found


def cut_down(path: Path) -> Source:
    """Return a real model's metadata with short arrays, and its tensors with one block each."""
    gguf = read_gguf(path)
    metadata: dict[str, Any] = dict(gguf.metadata)
    for key, value in gguf.metadata.items():
        if isinstance(value, GGUFArray):
            metadata[key] = Typed(ValueType.ARRAY, value.tolist()[:MAX_ARRAY], value.element_type)
    tensors = {
        name: RawTensor(t.type, (t.type.block_size, 1)[: len(t.shape)], bytes(t.type.block_bytes))
        for name, t in gguf.tensors.items()
    }
    return Source(metadata, tensors)


VALUES: list[Any] = [
    *(0, 1, 2, -1, 3, 4, 7, 512, 1025, 2**31, 2**32 - 1, 2**63, Typed(ValueType.INT64, -(2**63))),
    *(0.0, -1.0, 0.5, float("nan"), float("inf"), Typed(ValueType.FLOAT64, 1e308)),
    *("", "llama", "bert", "model", "none", "x" * 1000, b"\xff\x00", True, False),
    *([], [1, 2], [2**31, 1], [0, 0], ["a"], [0.5, 0.5], [True, False], [[1], [2]], np.array([-1, -2])),
]


def other_values(source: Source, rng: random.Random) -> Source:
    """Return a model in which one to three values are others, or gone."""
    metadata = dict(source.metadata)
    for key in rng.sample(sorted(metadata), min(len(metadata), rng.randint(1, 3))):
        if rng.random() < 0.2:
            del metadata[key]
        else:
            metadata[key] = rng.choice(VALUES)
    return Source(metadata, source.tensors)


def edit_number(data: bytearray, base: Built, rng: random.Random) -> None:
    """Set a count, length, type, dimension or offset to an extreme or a nearby value."""
    field = rng.choice(base.fields)
    top = 2 ** (8 * field.n_bytes)
    old = int.from_bytes(data[field.start : field.start + field.n_bytes], "little")
    choices = [0, 1, top - 1, top // 2, top // 2 - 1, 2**31, 2**32, len(data), old - 1, old + 1, old * 2, old << 8]
    value = rng.choice([*choices, rng.randrange(top), rng.randrange(64)]) % top
    data[field.start : field.start + field.n_bytes] = value.to_bytes(field.n_bytes, "little")


def flip_bits(data: bytearray, base: Built, rng: random.Random) -> None:
    """Flip one to eight bits of the header."""
    for _ in range(rng.randint(1, 8)):
        data[_place(data, base, rng)] ^= 1 << rng.randrange(8)


def set_byte(data: bytearray, base: Built, rng: random.Random) -> None:
    """Set a byte of the header to a value that matters more often than others."""
    data[_place(data, base, rng)] = rng.choice([0, 1, 9, 0x7F, 0x80, 0xC3, 0xFF])


def truncate(data: bytearray, base: Built, rng: random.Random) -> None:
    """Cut the file, within the header or after it."""
    del data[_place(data, base, rng) if rng.random() < 0.8 else rng.randrange(len(data) + 1) :]


def splice(data: bytearray, base: Built, rng: random.Random) -> None:
    """Take out a region, or put random bytes in."""
    start = _place(data, base, rng)
    end = min(len(data), start + rng.randint(0, 24))
    data[start:end] = rng.randbytes(rng.randint(0, 24))


def duplicate(data: bytearray, base: Built, rng: random.Random) -> None:
    """Copy a region of the header to another place, over what is there or in between."""
    start, target = _place(data, base, rng), _place(data, base, rng)
    region = data[start : start + rng.choice([4, 8, 16, 64, 256])]
    data[target : target + rng.choice([0, len(region)])] = region


def exchange_types(data: bytearray, base: Built, rng: random.Random) -> None:
    """Give one value or tensor the type of another."""
    types = [field for field in base.fields if field.kind == "type"]
    one, other = rng.choice(types), rng.choice(types)
    data[one.start : one.start + 4] = data[other.start : other.start + 4]


MUTATIONS: list[Callable[[bytearray, Built, random.Random], None]] = [
    edit_number,
    edit_number,
    flip_bits,
    set_byte,
    truncate,
    splice,
    duplicate,
    exchange_types,
]


def mutant(source: Source, sound: Built, rng: random.Random) -> bytes:
    """Return a file with other values in a sound header, or with one to three mutations of its bytes."""
    if rng.random() < 0.3:
        return build_gguf(other_values(source, rng).metadata, source.tensors).data
    data = bytearray(sound.data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        if data:
            rng.choice(MUTATIONS)(data, sound, rng)
    return bytes(data)


def _place(data: bytearray, base: Built, rng: random.Random) -> int:
    """Return a position within the header, however short the file has become."""
    last = base.fields[-1]
    return rng.randrange(min(len(data), last.start + last.n_bytes) or 1)


def exercise(path: Path) -> None:
    """Do all that a user's first command does with a file."""
    gguf = read_gguf(path)
    for value in gguf.metadata.values():
        if isinstance(value, GGUFArray):
            value.tolist()
    for name in gguf.tensors:
        gguf.read_tensor_bytes(name)
    kv_cache_bytes(describe(gguf), 4096)
    require_text_decoder(gguf)


def run(count: int, seconds: float, seed: int, keep: Path) -> dict[str, object]:
    """Try up to `count` mutants for up to `seconds`, and return the result for the last line."""
    rng = random.Random(seed)
    models = [(source, build_gguf(source.metadata, source.tensors)) for source in sources()]
    refused: Counter[str] = Counter()
    findings: list[Finding] = []
    n_done, n_ok, slowest_s = 0, 0, 0.0
    start = last_report = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "mutant.gguf"
        while n_done < count and time.perf_counter() - start < seconds:
            data = mutant(*rng.choice(models), rng)
            path.write_bytes(data)
            outcome, spent_s = attempt(path)
            n_done += 1
            slowest_s = max(slowest_s, spent_s)
            if isinstance(outcome, EdgedecError):
                refused[type(outcome).__name__] += 1
            elif outcome is None:
                n_ok += 1
            if spent_s > LIMIT_S or not (outcome is None or isinstance(outcome, EdgedecError)):
                findings.append(save(data, repr(outcome), spent_s, keep))
            if time.perf_counter() - last_report > 5:
                last_report = time.perf_counter()
                print(f"{n_done}/{count}, {len(findings)} findings", file=sys.stderr)
    return {
        "count": n_done,
        "ok": n_ok,
        "refused": dict(refused),
        "findings": [{"error": f.error, "seconds": f.seconds, "file": f.file} for f in findings],
        "seed": seed,
        "slowest_s": round(slowest_s, 4),
        "seconds": round(time.perf_counter() - start, 1),
    }


def attempt(path: Path) -> tuple[BaseException | None, float]:
    """Return what came out of one mutant (None for success) and the time it took."""
    start = time.perf_counter()
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 10 * LIMIT_S)
    outcome: BaseException | None = None
    try:
        exercise(path)
    except (Exception, TooSlow) as error:
        outcome = error
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
    return outcome, time.perf_counter() - start


def save(data: bytes, error: str, seconds: float, keep: Path) -> Finding:
    """Keep a mutant as a file."""
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"finding-{len(list(keep.iterdir())):04}.gguf"
    path.write_bytes(data)
    print(f"finding: {error} after {seconds:.2f} s, kept as {path}", file=sys.stderr)
    return Finding(error, round(seconds, 3), str(path))


def limit_memory() -> None:
    """Let the process grow by LIMIT_BYTES at most, where the system can (Linux)."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        import resource  # absent on Windows

        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    """Parse the command line, run, print one line of JSON; 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="mutants to try (default: 20000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default: 0)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where findings are kept")
    options = parser.parse_args()

    def on_alarm(signal_number: int, frame: FrameType | None) -> None:
        raise TooSlow

    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, on_alarm)
    limit_memory()
    result = run(options.count, options.seconds, options.seed, options.keep)
    print(json.dumps(result))
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
