"""Load damaged models with the cpu runtime and evaluate them: an answer or an EdgedecError must come out.

    python benchmarks/fuzz/fuzz_cpu.py --seconds 120 --seed 1 --keep findings/

The damage is that of fuzz_gguf.py (bytes of headers, their values, shapes, types and names of tensors) and, here only,
to the data of tensors (random bytes, scales that are NaN or infinite). Each mutant is loaded by a worker process,
which opens a session, evaluates a chain, a tree and a second session, and turns a text into ids and back. Then it loads
the mutant from a file of tiles, with all or a part of the weights in memory, cuts that file short or writes other bytes
to it between two forwards, and restores it. A worker that dies, hangs or raises anything else is a finding, and so is
an error that asks to be reported. Findings are kept as files.
"""

import os
import random
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fuzz_bases import Source, loadable_sources
from fuzz_gguf import TEXT
from fuzz_mutants import contradictory, damaged, other_data
from fuzz_runs import Tried, arguments, be_worker, fuzz, worker
from support.models.gguf_writer import Built, build_gguf
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, Tiny, tiny_metadata, tiny_tensors

from edgedec.errors import EdgedecError, RequestError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, RowGroup
from edgedec.plugins import ARCHITECTURES as RUN
from edgedec.plugins import is_own
from edgedec_runtimes.cpu.library import KV_TYPES
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.weights import tile_job


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


def mutant(models: list[tuple[Source, Built]], rng: random.Random) -> bytes:
    """Return a damaged file."""
    source, built = rng.choice(models)
    kind = rng.random()
    if kind < 0.3:
        return other_data(source, rng)
    return contradictory(source, rng) if kind < 0.8 else damaged(source, built, rng)


def evaluate(path: Path, seed: int) -> None:
    """Load a model and use it a little; in a worker."""
    options = LoadOptions(n_ctx=64, n_threads=1 + seed % 2, kv_type=tuple(KV_TYPES)[seed // 2 % len(KV_TYPES)])
    Cpu().plan(path, options)
    with Cpu().load(path, options) as model, np.errstate(all="ignore"):
        n_vocab = model.card.n_vocab
        ids = model.tokenizer.encode(TEXT, add_special=True, parse_special=True)
        model.tokenizer.decode([*ids, *range(min(n_vocab, 300)), n_vocab - 1])
        tokens = np.array([0, n_vocab // 2, n_vocab - 1, 0, n_vocab // 3, 0], np.int32)
        session, other = model.session(64), model.session(64)
        session.forward(tokens, n_past=0, rows="all")
        session.forward(tokens, n_past=6, parents=np.array([-1, 0, 0, -1, 3, 1], np.int32), rows="all")
        session.keep(np.array([0, 1, 5], np.int32))
        twin = session.fork()
        each = ((session, 9, tokens[:1]), (other, 0, np.resize(tokens, 60)), (twin, 9, tokens))
        model.forward([ForwardItem(its, n_past, (RowGroup(rows),)) for its, n_past, rows in each])


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
                for rows, n_past in ((tokens, 1), (tokens[:2], 0)):
                    with suppress(EdgedecError):
                        session.forward(rows, n_past=n_past)
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


def load(path: Path, number: int) -> None:
    """Evaluate a mutant from its file, and from its tiles; in a worker."""
    evaluate(path, number)
    evaluate_from_disk(path, number)


def main() -> int:
    """Try mutants of each model, the sound ones first, which must be taken."""
    options = arguments(__doc__, "--worker")
    if options.worker:
        return be_worker(load)
    rng, models = random.Random(options.seed), sources()
    with tempfile.TemporaryDirectory() as folder, worker(__file__) as loads:
        path = Path(folder) / "mutant.gguf"

        def write(number: int) -> Path:
            path.write_bytes(models[number][1].data if number < len(models) else mutant(models, rng))
            return path

        def attempt(path: Path, number: int) -> Tried:
            tried, words = loads.load(path, number)
            is_wrong = number < len(models) and tried.outcome != "ok" and "no multiple of 32" not in words
            return replace(tried, finding=words or tried.outcome) if is_wrong else tried

        return fuzz(options, write, attempt)


if __name__ == "__main__":
    sys.exit(main())
