"""Damage GGUF headers at random: an answer or an EdgedecError must come out, quickly and in little memory.

    python benchmarks/fuzz/fuzz_gguf.py --count 20000 --seed 1 --keep findings/

The models to damage are the tests' tiny ones and, where it is installed, the header of SmolLM2 135M with its tokenizer
cut short. Each mutant is read, described, checked for a text decoder, its arrays decoded and its tensors read. A
finding is any other exception, more than 1 s, or more memory than LIMIT_BYTES above the start. Findings are kept as
files.

With --load (the default where llama_cpp is installed) two mutants in three contradict themselves in a
sound header, and each mutant that passes the checks is loaded by llama.cpp in a worker process, which opens
a session, evaluates three tokens and takes the vocabulary there and back. A worker that dies, hangs or raises anything
but EdgedecError is a finding, too.
"""

import importlib.util
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fuzz_bases import Source, header_sources, loadable_sources
from fuzz_mutants import contradictory, damaged
from fuzz_runs import Tried, arguments, be_worker, fuzz, here, let_grow, worker
from support.models.gguf_writer import Built, build_gguf

from edgedec.gguf.file import GGUFArray, read_gguf
from edgedec.gguf.model_info import describe
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec.load_options import LoadOptions
from edgedec_runtimes.shared.consistency import require_consistent

LIMIT_S = 1.0
LIMIT_BYTES = 128 * 2**20
TEXT = "Hi <s>hello<|im_end|> w\u00f6rld 123\n\t \u20ac\U0001f642 don't\x00 <0x0A>"


@dataclass(frozen=True, slots=True)
class Models:
    """The sound models, with the bytes they are written as."""

    headers: list[tuple[Source, Built]]
    loadable: list[tuple[Source, Built]]

    def mutant(self, rng: random.Random) -> bytes:
        """Return a damaged file."""
        if not self.loadable or rng.random() < 0.2:
            return damaged(*rng.choice(self.headers), rng)
        source, built = rng.choice(self.loadable)
        return contradictory(source, rng) if rng.random() < 0.85 else damaged(source, built, rng)


def models(loads: bool) -> Models:
    """Return the models to damage."""
    headers = [(source, build_gguf(source.metadata, source.tensors)) for source in header_sources()]
    sound = loadable_sources() if loads else []
    return Models(headers, [(source, build_gguf(source.metadata, source.tensors)) for source in sound])


def exercise(path: Path) -> str:
    """Do all that a user's first command does with a file before a runtime gets it."""
    gguf = read_gguf(path)
    for value in gguf.metadata.values():
        if isinstance(value, GGUFArray):
            value.tolist()
    for name in gguf.tensors:
        gguf.read_tensor_bytes(name)
    describe(gguf)
    require_text_decoder(gguf)
    require_consistent(gguf)
    return "ok"


def load(path: Path, number: int) -> None:
    """Load a mutant as the llamacpp runtime does, one in four after a plan, and evaluate a little; in a worker."""
    from edgedec_runtimes.llamacpp.runtime import LlamaCpp

    options = LoadOptions(n_ctx=64, max_rows=2, n_threads=1)
    if number % 4 == 0:
        LlamaCpp().plan(path, options)
    with LlamaCpp().load(path, options) as model:
        tokenizer = model.tokenizer
        for parse_special in (False, True):
            ids = tokenizer.encode(TEXT, add_special=True, parse_special=parse_special)
            tokenizer.decode(ids)
        n_vocab = model.card.n_vocab
        tokenizer.decode([*range(min(n_vocab, 300)), n_vocab - 1])
        tokenizer.is_end(0), tokenizer.bos_token, tokenizer.eos_token
        session = model.session(64)
        session.forward(np.array([0, n_vocab // 2, n_vocab - 1], np.int32), n_past=0, rows="last")
        session.forward(np.array([n_vocab // 3], np.int32), n_past=3)


def main() -> int:
    """Try headers here, and what passes the checks with llama.cpp in a worker."""
    options = arguments(__doc__, "--load", "--worker")
    if options.worker:
        os.environ["GGML_NO_BACKTRACE"] = "1"  # a backtrace starts a debugger
        return be_worker(load)
    loads = options.load if options.load is not None else importlib.util.find_spec("llama_cpp") is not None
    rng, sound = random.Random(options.seed), models(loads)
    let_grow(LIMIT_BYTES)
    with tempfile.TemporaryDirectory() as folder, worker(__file__) as loading:
        path = Path(folder) / "mutant.gguf"

        def write(number: int) -> Path:
            path.write_bytes(sound.mutant(rng))
            return path

        def attempt(path: Path, number: int) -> Tried:
            tried = here(lambda: exercise(path), LIMIT_S)
            if not loads or tried.finding or tried.outcome != "ok":
                return tried
            return loading.load(path, number)[0]

        return fuzz(options, write, attempt)


if __name__ == "__main__":
    sys.exit(main())
