"""Large grammars, and what they take in a process of their own.

A process that is spawned imports this module, not the test's.
"""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from edgedec.errors import RequestError
from edgedec.gguf.file import read_gguf
from edgedec.grammar import LEAST_GRAMMAR_BYTES, Grammar
from edgedec.memory.system import resident_bytes, return_free_memory
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.grammar.compiler import Llguidance, MatcherState
from edgedec_runtimes.tokenizer import open_tokenizer

NASTY = "((a{1,300}|b{1,300}){1,300}){1,300}"
LARGE: dict[str, Grammar] = {
    "counts in counts": Grammar.regex(NASTY),
    "something long ago": Grammar.regex(".*a.{500}"),
    "letters of all scripts": Grammar.regex(r"(\w{1,200} ){1,200}"),
    "terminals": Grammar.lark(
        "start: x+\nx: " + " | ".join(f"T{i}" for i in range(500)) + "\n"
        "" + "\n".join(f"T{i}: /[a-z]{{1,{i + 1}}}{i}/" for i in range(500))
    ),
    "optional properties": Grammar.json_schema(
        {"properties": {f"p{i}": {"type": "integer"} for i in range(3000)}, "additionalProperties": False}
    ),
    "lists": Grammar.json_schema({"examples": [[]] * 240_000}),
    "references": Grammar.json_schema(
        {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1900)}}
    ),
    "cases": Grammar.json_schema(
        {"anyOf": [{"required": [f"k{i}{j}" for j in range(8)], "maxProperties": 8} for i in range(700)]}
    ),
}


def peak_bytes() -> int:
    """Return the most that was held since forget_peak, on Linux."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> int:
    """Begin anew with the peak, and return what is held now."""
    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_bytes() or 0


def followed(state: MatcherState, tokenizer: Tokenizer, n_tokens: int, seed: int = 0) -> int:
    """Take allowed tokens, any of them, until the grammar is at an end; return how many."""
    drawn = np.random.default_rng(seed)
    is_text = np.array([not tokenizer.is_end(i) for i in range(tokenizer.n_vocab)])
    for n in range(n_tokens):
        ids = np.flatnonzero(state.allowed() & is_text)
        if not len(ids):
            return n
        state.forced()
        assert state.advance(int(ids[drawn.integers(len(ids))]))
    return n_tokens


def measured(name: str, model: Path) -> tuple[int, str]:
    """Compile and follow a grammar of LARGE in a new process, where nothing else takes memory.

    Returns:
        How many bytes its peak lay above what was held before, and why it was refused; "" where it went through.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_measured, name, model).result()


def _measured(name: str, model: Path) -> tuple[int, str]:
    tokenizer = open_tokenizer(read_gguf(model))
    compiler = Llguidance(tokenizer, LEAST_GRAMMAR_BYTES)
    compiler.compile(Grammar.regex("a+")).allowed()
    held, refused = forget_peak(), ""
    try:
        followed(compiler.compile(LARGE[name]), tokenizer, 100)
    except RequestError as error:
        refused = str(error)
    return peak_bytes() - held, refused
