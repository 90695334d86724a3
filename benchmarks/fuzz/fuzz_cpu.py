"""Load damaged models with the cpu runtime and evaluate them: an answer or an EdgedecError must come out.

    python benchmarks/fuzz/fuzz_cpu.py --seconds 120 --seed 1 --keep findings/

The damage is that of fuzz_gguf.py (bytes of headers, their values, shapes, types and names of tensors) and, here only,
to the data of tensors (random bytes, scales that are NaN or infinite). Each mutant is loaded by a worker process,
which opens a session, evaluates a chain, a tree and a second session, and turns a text into ids and back. Then it loads
the mutant from a file of tiles, with all or a part of the weights in memory, cuts that file short or writes other bytes
to it between two forwards, and restores it. A worker that dies, hangs or raises anything else is a finding, and so is
an error that asks to be reported. Findings are kept as files.
"""

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fuzz_bases import Source, loadable_sources
from fuzz_gguf import Finding, save
from fuzz_mutants import contradictory, damaged
from support.models.gguf_writer import Built, RawTensor, build_gguf
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, Tiny, tiny_metadata, tiny_tensors

from edgedec.errors import EdgedecError, RequestError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem
from edgedec.plugins import ARCHITECTURES as RUN
from edgedec.plugins import is_own
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.weights import tile_job

LIMIT_S = 20
LIMIT_BYTES = 2 * 2**30
LOADS_PER_WORKER = 400
_TEXT = "Hi <s>hello<|im_end|> w\u00f6rld 123\n\t \u20ac\U0001f642 don't\x00 <0x0A>"
_PATTERNS = (b"\xff", b"\x00\x7c", b"\xff\x7f", b"\x00\x00\xc0\x7f", b"\x80", b"\x7f", b"\xff\xff\x7f\x7f")


def sources() -> list[tuple[Source, Built]]:
    """Return sound models of the architectures that the runtime has, small ones of all tensor types among them."""
    found = [s for s in loadable_sources() if is_own(RUN, s.metadata["general.architecture"])]
    shapes = [tiny for name, tiny in ARCHITECTURES.items() if name != "qwen3"]  # its wide heads take longest
    for i, tiny in enumerate(shapes):
        n_layer = tiny.n_layer if tiny.convolutions or tiny.recurrent or tiny.parts or tiny.narrow else 2
        changes = {"types": TILE_TYPES, "n_layer": n_layer, "seed": i}
        mixed = Tiny(**{n: getattr(tiny, n) for n in Tiny.__slots__} | changes)
        found.append(Source(tiny_metadata(mixed), dict(tiny_tensors(mixed))))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sound.gguf"
        built = [(source, build_gguf(source.metadata, source.tensors)) for source in found]
        return [(source, b) for source, b in built if path.write_bytes(b.data) and Cpu().accepts(path) is None]


def other_data(source: Source, rng: random.Random) -> bytes:
    """Return a file whose header is sound and whose tensors hold other bytes."""
    tensors: dict[str, Any] = dict(source.tensors)
    for name in rng.sample(sorted(tensors), rng.choice([1, 1, 2, 5])):
        old: RawTensor = tensors[name]
        data = bytearray(old.data)
        if rng.random() < 0.4:
            data[:] = rng.randbytes(len(data))
        elif rng.random() < 0.5:
            data[:] = (rng.choice(_PATTERNS) * len(data))[: len(data)]
        else:
            for _ in range(rng.randint(1, 20)):
                data[rng.randrange(len(data))] = rng.choice([0x7F, 0xFF, 0x7C, 0xFC, 0x00, 0x80])
        tensors[name] = RawTensor(old.type, old.shape, bytes(data))
    return build_gguf(source.metadata, tensors).data


def mutant(models: list[tuple[Source, Built]], rng: random.Random) -> bytes:
    """Return a damaged file."""
    source, built = rng.choice(models)
    kind = rng.random()
    if kind < 0.3:
        return other_data(source, rng)
    return contradictory(source, rng) if kind < 0.8 else damaged(source, built, rng)


def evaluate(path: Path, seed: int) -> None:
    """Load a model and use it a little; in a worker."""
    options = LoadOptions(n_ctx=64, n_threads=1 + seed % 2, kv_type=("f16", "q8_0", "q4_0", "gear")[seed // 2 % 4])
    Cpu().plan(path, options)
    with Cpu().load(path, options) as model, np.errstate(all="ignore"):
        n_vocab = model.card.n_vocab
        ids = model.tokenizer.encode(_TEXT, add_special=True, parse_special=True)
        model.tokenizer.decode([*ids, *range(min(n_vocab, 300)), n_vocab - 1])
        tokens = np.array([0, n_vocab // 2, n_vocab - 1, 0, n_vocab // 3, 0], np.int32)
        session, other = model.session(64), model.session(64)
        session.forward(tokens, n_past=0, rows="all")
        session.forward(tokens, n_past=6, parents=np.array([-1, 0, 0, -1, 3, 1], np.int32), rows="all")
        session.keep(np.array([0, 1, 5], np.int32))
        twin = session.fork()
        items = [
            ForwardItem(session, 9, tokens[:1]),
            ForwardItem(other, 0, np.resize(tokens, 60)),
            ForwardItem(twin, 9, tokens),
        ]
        model.forward(items)


def evaluate_from_disk(path: Path, seed: int) -> None:
    """Load a model from its tiles, some of which may stay on the disk, and damage their file while it runs."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        options = LoadOptions(n_ctx=64, n_threads=1 + seed % 2, cache_dir=Path(folder))
        network = read_network(read_gguf(path))
        n_bytes = tile_job(read_gguf(path), network, options).n_bytes
        if seed % 4:  # else mapped
            options = replace(options, resident_bytes=max(1, int(n_bytes * rng.uniform(0.1, 1.0))))
        try:
            model = Cpu().load(path, options)
        except RequestError:  # what streaming needs is more
            return
        with model:
            session = model.session(64)
            tokens = np.array([rng.randrange(model.card.n_vocab) for _ in range(12)], np.int32)
            session.forward(tokens[:1], n_past=0)
            for tiles in (Path(folder) / "tiles").glob("*.tiles"):
                whole = tiles.read_bytes()
                _damage(tiles, whole, rng)
                with suppress(EdgedecError):
                    session.forward(tokens, n_past=1)
                with suppress(EdgedecError):
                    session.forward(tokens[:2], n_past=0)
                if not tiles.exists():  # the runtime found the damage, and deleted the file
                    return
                with tiles.open("r+b") as file:
                    file.write(whole)
            session.forward(tokens, n_past=0)


def _damage(tiles: Path, whole: bytes, rng: random.Random) -> None:
    """Cut a file short, or write other bytes to a place in it."""
    if rng.random() < 0.7:
        os.truncate(tiles, rng.choice([0, 1, 4096, rng.randrange(len(whole)), len(whole) - 1]))
        return
    with tiles.open("r+b") as file:
        file.seek(rng.randrange(len(whole)))
        file.write(rng.randbytes(rng.randint(1, 4096)))


def work() -> None:
    """Load the models that standard input names, and answer each with a line of JSON."""
    _limit_memory()
    for line in sys.stdin:
        seed, _, name = line.rstrip("\n").partition(" ")
        outcome, detail = "ok", ""
        try:
            evaluate(Path(name), int(seed))
            evaluate_from_disk(Path(name), int(seed))
        except EdgedecError as error:
            outcome, detail = "refused", f"{type(error).__name__}: {error}"
            if "report" in detail:
                outcome = "raised"
        except BaseException as error:
            outcome, detail = "raised", repr(error)
        print(json.dumps([outcome, detail]), flush=True)


def _limit_memory() -> None:
    """Let this process have LIMIT_BYTES, where the system can hold it to that."""
    try:
        import resource  # absent on Windows
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Worker:
    """A process that loads mutants, started anew where one ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._n_left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._log.close()

    def load(self, path: Path, seed: int) -> tuple[str, str]:
        """Return what came out of a mutant: "ok", "refused", "raised" or "crashed", and more words."""
        if self._n_left == 0:
            self._end()
        process = self._process or self._start()
        self._n_left -= 1
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{seed} {path}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
        line = process.stdout.readline() if ready else ""
        if line:
            outcome, detail = json.loads(line)
            return outcome, detail
        how = f"no end after {LIMIT_S} s" if not ready else f"exit code {process.wait()}"
        self._end()
        self._log.seek(0)
        return "crashed", f"{how}: {self._log.read()[-3000:].decode(errors='replace')}"

    def _start(self) -> subprocess.Popen[str]:
        self._log.truncate(0)
        command = [sys.executable, "-X", "faulthandler", "-W", "error", str(Path(__file__).resolve()), "--worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._n_left = LOADS_PER_WORKER
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._n_left = None, 0


def run(seconds: float, count: int, seed: int, keep: Path) -> dict[str, object]:
    """Try mutants for up to `seconds` or up to `count` of them, and return the result for the last line."""
    rng, models = random.Random(seed), sources()
    outcomes: Counter[str] = Counter()
    findings: list[Finding] = []
    slowest_s, start = 0.0, time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, Worker() as worker:
        path = Path(directory) / "mutant.gguf"
        n_done = 0
        while n_done < count and time.perf_counter() - start < seconds:
            data = mutant(models, rng) if n_done >= len(models) else models[n_done][1].data  # first the sound ones
            path.write_bytes(data)
            began = time.perf_counter()
            outcome, detail = worker.load(path, n_done)
            spent_s = time.perf_counter() - began
            slowest_s = max(slowest_s, spent_s)
            is_sound = n_done < len(models) and "no multiple of 32" not in detail
            n_done += 1
            outcomes[outcome] += 1
            if outcome in ("raised", "crashed") or (is_sound and outcome != "ok"):
                findings.append(save(data, f"{outcome} {detail}", spent_s, keep))
            if n_done % 500 == 0:
                print(f"{n_done} mutants, {dict(outcomes)}, {len(findings)} findings", file=sys.stderr)
    return {
        "count": n_done,
        "outcomes": dict(outcomes),
        "findings": [{"error": f.error, "seconds": f.seconds, "file": f.file} for f in findings],
        "seed": seed,
        "slowest_s": round(slowest_s, 3),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> int:
    """Parse the command line, run, print one line of JSON; 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="stop after this time (default: 60)")
    parser.add_argument("--count", type=int, default=10**9, help="stop after as many mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default: 0)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where findings are kept")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    result = run(options.seconds, options.count, options.seed, options.keep)
    print(json.dumps(result))
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
