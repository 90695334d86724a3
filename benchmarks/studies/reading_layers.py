"""Which layers' attention says what a question about a long document needs, and how few slots hold most attention.

    python benchmarks/studies/reading_layers.py smollm2-135m --tokens 2000 --count 9 --json-out FILE

Of the made documents of benchmarks/answers/prompt_keep.py the script reports, for parts of the model's depth and for
each layer, in how many documents the line that the question is about would be read whole at a share of the prompt, by
the rule of edgedec_methods.prompt_keep; and how much of the attention of a prompt's last row its best tenth of the
slots holds, the mean of the heads of each layer.
"""

import argparse
import math
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "answers"))

from prompt_keep import KINDS, Asked, prompt_of

import edgedec
from edgedec.model import Session
from edgedec_apps.bench.provenance import report
from edgedec_methods.prompt_keep import WINDOW, frame_of, kept_tokens

_KEEPS = 0.2, 0.3, 0.5
_NO_ROWS = np.empty(0, np.int32)


def masses(session: Session, ids: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the mass of all layers, f32[n_layer, n_head, n], by the rule of prompts in part, and of the last row."""
    layers, n = tuple(range(session.model.card.n_layer)), len(ids)
    rising = np.arange(1, WINDOW + 1, dtype=np.float32) / np.float32(WINDOW)
    session.forward(ids[: n - WINDOW], n_past=0, rows=_NO_ROWS)
    found = session.forward(ids[n - WINDOW :], n_past=n - WINDOW, rows=_NO_ROWS, mass=(layers, rising)).mass
    last = session.forward(ids[n - 1 :], n_past=n - 1, rows=_NO_ROWS, mass=(layers, rising[-1:])).mass
    assert found is not None, "it was asked for"
    assert last is not None, "it was asked for"
    return found, last


def line_of(engine: edgedec.Engine, ids: tuple[int, ...], asked: Asked) -> set[int]:
    """Return the places of the tokens of the line that the question is about."""
    pieces = [engine.tokenizer.piece(i) for i in ids]
    starts = np.cumsum([0, *map(len, pieces)])
    line = asked.lines[asked.at].encode()
    begin = b"".join(pieces).index(line)
    return set(np.flatnonzero((starts[1:] > begin) & (starts[:-1] < begin + len(line))).tolist())


def main() -> None:
    """Read, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--count", type=int, default=9)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    hits, tenths = Counter[str](), []
    with edgedec.load(args.model, runtime="cpu", offline=True, draft="off", n_ctx=args.tokens + 512) as engine:
        n = engine.card.n_layer
        parts = {"first third": range(n // 9, math.ceil(n / 3)), "first half": range(n // 6, math.ceil(n / 2))}
        parts |= {"last two thirds": range(n // 3, n), **{f"layer {i}": range(i, i + 1) for i in range(n)}}
        for number in range(args.count):
            ids, asked = prompt_of(engine, KINDS[number % len(KINDS)], number // len(KINDS), args.tokens)
            with closing(engine.model.session(len(ids) + 1)) as session:
                mass, last = masses(session, np.array(ids, np.int32))
            line, frame = line_of(engine, ids, asked), frame_of(engine.tokenizer, ids)
            tenths.append((-np.sort(-last, axis=2))[..., : math.ceil(len(ids) / 10)].sum(axis=2).mean(axis=1))
            for name, layers in parts.items():
                for keep in _KEEPS:
                    held = kept_tokens(mass[layers.start : layers.stop].max(axis=(0, 1)), frame, keep)
                    hits[f"{name} {keep}"] += line <= set(held.tolist())
    for name in parts:
        print(f"{name:>16}: " + ", ".join(f"{hits[f'{name} {keep}']} of {args.count} at {keep}" for keep in _KEEPS))
    tenth = np.mean(tenths, axis=0)
    print("the best tenth of the slots holds, by layer:", *(f"{share:.2f}" for share in tenth))
    figures = {"model": args.model, "tokens": args.tokens, "count": args.count, "tenth": tenth.tolist()}
    report({"benchmark": "reading_layers", **figures, "hits": dict(hits)}, args.json_out)


if __name__ == "__main__":
    main()
