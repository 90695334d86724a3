"""Damage projector files at random, and encode a picture with ours: rows or an EdgedecError must come out.

    python benchmarks/fuzz/fuzz_projectors.py --seconds 60 --seed 1 --keep findings/

Sound files of gemma3, idefics3 and lfm2, in several tensor types, are damaged in their bytes, in what they say, and in
the data of their tensors. Each is opened as a user's model opens it, and encodes a small picture; some files are cut
short between two pictures. A finding is any exception but an EdgedecError, an error that asks to be reported, or more
than LIMIT_S of the processor's time. Findings are kept as files. Where the native code dies, the process does; the
mutant is then in the folder that the first line of standard error names.
"""

import os
import random
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fuzz_bases import Source
from fuzz_mutants import damaged, other_data, other_values
from fuzz_runs import Tried, arguments, fuzz, here
from support.models.gguf_writer import Built, build_gguf
from support.models.siglip_files import siglip_parts

from edgedec.errors import SessionError
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.header import read_projector
from edgedec_runtimes.pictures.native_encoder import open_native

LIMIT_S = 5.0
_PICTURE = Picture(70, 50, np.random.default_rng(0).integers(0, 256, 70 * 50 * 3, np.uint8).tobytes())


def sources() -> list[tuple[Source, Built]]:
    """Return sound files, as values and tensors and as bytes."""
    found = []
    for kind in ("gemma3", "idefics3", "lfm2"):
        for type_name in ("F32", "F16", "Q8_0"):
            metadata, tensors = siglip_parts(kind, type_name, n_layer=1, merge=2 if kind == "lfm2" else 4)
            found.append((Source(metadata, tensors), build_gguf(metadata, tensors)))
    return found


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


def exercise(path: Path, cut: int | None, n_threads: int) -> str:
    """Open a file, encode a picture, and another one after the file was cut; return whether it was our encoder's."""
    try:
        return encoded(path, cut, n_threads)
    except SessionError as error:
        raise AssertionError("it asks to be reported") from error


def encoded(path: Path, cut: int | None, n_threads: int) -> str:
    """Do what `exercise` says; an error that asks to be reported is a SessionError."""
    encoder = open_native(path, read_projector(path), n_threads)
    if encoder is None:
        return "not ours"
    try:
        encoder.terms()
        rows = encoder.encode(_PICTURE)
        assert all(np.isfinite(block).all() for block in rows)
        if cut is not None:
            os.truncate(path, cut)
            encoder.encode(_PICTURE)
    finally:
        encoder.close()
    return "ok"


def main() -> int:
    """Try projectors in this process."""
    options = arguments(__doc__)
    warnings.simplefilter("ignore", RuntimeWarning)  # damaged weights overflow
    rng, bases = random.Random(options.seed), sources()
    with tempfile.TemporaryDirectory() as folder:
        print(f"mutants are written to {folder}", file=sys.stderr)
        path = Path(folder) / "mutant.gguf"

        def write(number: int) -> Path:
            path.unlink(missing_ok=True)
            path.write_bytes(mutant(bases, rng))
            return path

        def attempt(path: Path, number: int) -> Tried:
            n_bytes = path.stat().st_size
            cut = rng.randrange(n_bytes) if n_bytes and rng.random() < 0.3 else None
            return here(lambda: exercise(path, cut, 1 + number % 2), LIMIT_S)

        return fuzz(options, write, attempt)


if __name__ == "__main__":
    sys.exit(main())
