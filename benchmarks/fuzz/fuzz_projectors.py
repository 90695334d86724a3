"""Damage projector files at random, and encode a picture with ours: rows or an EdgedecError must come out.

    python benchmarks/fuzz/fuzz_projectors.py --seconds 60 --seed 1 --keep findings/

Sound files of gemma3, idefics3 and lfm2, in several tensor types, are damaged in their bytes, in what they say, and in
the data of their tensors. Each is opened as a user's model opens it, and encodes a small picture; some files are cut
short between two pictures. A finding is any exception but an EdgedecError, an error that asks to be reported, or more
than LIMIT_S of the processor's time. Findings are kept as files. Where the native code dies, the process does; the
mutant is then in the folder that the first line of standard error names.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fuzz_bases import Source
from fuzz_gguf import save
from fuzz_mutants import damaged, other_values
from support.models.gguf_writer import Built, RawTensor, build_gguf
from support.models.siglip_files import siglip_parts

from edgedec.errors import EdgedecError, SessionError
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.header import read_projector
from edgedec_runtimes.pictures.native_encoder import open_native

LIMIT_S = 5.0
_PATTERNS = (b"\xff", b"\x00\x7c", b"\xff\x7f", b"\x00\x00\xc0\x7f", b"\x80", b"\x7f", b"\xff\xff\x7f\x7f", b"\x00")
_PICTURE = Picture(70, 50, np.random.default_rng(0).integers(0, 256, 70 * 50 * 3, np.uint8).tobytes())


def sources() -> list[tuple[Source, Built]]:
    """Return sound files, as values and tensors and as bytes."""
    found = []
    for kind in ("gemma3", "idefics3", "lfm2"):
        for type_name in ("F32", "F16", "Q8_0"):
            metadata, tensors = siglip_parts(kind, type_name, n_layer=1, merge=2 if kind == "lfm2" else 4)
            found.append((Source(metadata, tensors), build_gguf(metadata, tensors)))
    return found


def other_data(source: Source, rng: random.Random) -> bytes:
    """Return a file whose header is sound and one of whose tensors holds other bytes."""
    tensors: dict[str, Any] = dict(source.tensors)
    name = rng.choice(sorted(tensors))
    old = tensors[name]
    is_raw = isinstance(old, RawTensor)
    n_bytes = len(old.data) if is_raw else old.nbytes
    data = rng.randbytes(n_bytes) if rng.random() < 0.5 else (rng.choice(_PATTERNS) * n_bytes)[:n_bytes]
    tensors[name] = (
        RawTensor(old.type, old.shape, data) if is_raw else np.frombuffer(data, old.dtype).reshape(old.shape)
    )
    return build_gguf(source.metadata, tensors).data


def mutant(bases: list[tuple[Source, Built]], rng: random.Random) -> bytes:
    """Return a damaged file, or now and then a sound one."""
    source, built = rng.choice(bases)
    how = rng.randrange(4)
    if how == 0:
        return other_data(source, rng)
    if how == 1:
        return damaged(source, built, rng)
    changed = other_values(source, rng) if how == 2 else source
    return build_gguf(changed.metadata, changed.tensors).data


def exercise(path: Path, cut: int | None, n_threads: int) -> bool:
    """Open a file, encode a picture, and another one after the file was cut; return whether it was our encoder's."""
    encoder = open_native(path, read_projector(path), n_threads)
    if encoder is None:
        return False
    try:
        encoder.terms()
        rows = encoder.encode(_PICTURE)
        assert all(np.isfinite(block).all() for block in rows)
        if cut is not None:
            os.truncate(path, cut)
            encoder.encode(_PICTURE)
    finally:
        encoder.close()
    return True


def run(count: int, seconds: float, seed: int, keep: Path) -> dict[str, object]:
    """Try up to `count` mutants for up to `seconds`, and return the result for the last line."""
    rng, bases = random.Random(seed), sources()
    refused: Counter[str] = Counter()
    findings: list[dict[str, object]] = []
    n_done, n_ours, start = 0, 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        print(f"mutants are written to {directory}", file=sys.stderr)
        path = Path(directory) / "mutant.gguf"
        while n_done < count and time.perf_counter() - start < seconds:
            data = mutant(bases, rng)
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            cut = rng.randrange(len(data)) if data and rng.random() < 0.3 else None
            began, outcome = time.process_time(), ""
            try:
                n_ours += exercise(path, cut, 1 + n_done % 2)
            except EdgedecError as error:
                refused[type(error).__name__] += 1
                outcome = repr(error) if isinstance(error, SessionError) else ""
            except Exception as error:
                outcome = repr(error)
            n_done += 1
            spent_s = time.process_time() - began
            if outcome or spent_s > LIMIT_S:
                findings.append(asdict(save(data, outcome, spent_s, keep)))
    return {"count": n_done, "ours": n_ours, "refused": dict(refused), "findings": findings, "seed": seed}


def main() -> int:
    """Parse the command line, run, print one line of JSON; 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="mutants to try (default: 20000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default: 0)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where findings are kept")
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # damaged weights overflow
    result = run(options.count, options.seconds, options.seed, options.keep)
    print(json.dumps(result))
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
