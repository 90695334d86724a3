"""Which layers' attention says what a question about a long document needs.

    python benchmarks/studies/reading_layers.py qwen2.5-coder-1.5b --tokens 8000 --count 40 --layers 14 --json-out FILE

Of the made questions of benchmarks/answers/prompt_keep.py the script reports, for parts of the model's depth and for
each layer, for how many questions the line that the question is about would be read whole at a share of the prompt, by
the rule of edgedec_methods.prompt_keep. Only the first --layers layers read: no layer above them changes what they say.
A document is read once for its questions.
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

from prompt_keep import Asked, prompt_of, task

import edgedec
from edgedec.model import LayerSet, Session
from edgedec.sequence import n_common
from edgedec_apps.bench.provenance import report
from edgedec_methods.prompt_keep import WINDOW, frame_of, kept_tokens

_KEEPS = 0.1, 0.2, 0.3, 0.5
_NO_ROWS = np.empty(0, np.int32)


def masses(session: Session, ids: NDArray[np.int32], n_held: int, layers: range) -> NDArray[np.float32]:
    """Return the mass of the first layers, f32[n_layers, n_head, n], by the rule of prompts in part.

    The session holds the prompt's first `n_held` tokens, and all of it then.
    """
    run, n = LayerSet.of(session.model.card.n_layer, layers), len(ids) - WINDOW
    rising = np.arange(1, WINDOW + 1, dtype=np.float32) / np.float32(WINDOW)
    if n_held < n:
        session.forward(ids[n_held:n], n_past=n_held, rows=_NO_ROWS, layers=run)
    found = session.forward(ids[n:], n_past=n, rows=_NO_ROWS, layers=run, mass=(tuple(layers), rising)).mass
    assert found is not None, "it was asked for"
    return found


def line_of(engine: edgedec.Engine, ids: tuple[int, ...], asked: Asked) -> set[int]:
    """Return the places of the tokens of the line that the question is about."""
    pieces = [engine.tokenizer.piece(i) for i in ids]
    starts = np.cumsum([0, *map(len, pieces)])
    line = asked.lines[asked.at].encode()
    begin = b"".join(pieces).index(line)
    return set(np.flatnonzero((starts[1:] > begin) & (starts[:-1] < begin + len(line))).tolist())


def parts_of(n_layer: int, n_read: int) -> dict[str, range]:
    """Return the parts of the first `n_read` layers by name: first parts of the whole depth, later parts, and layers.

    Of a first part, the first third of the layers is not listened to.
    """
    firsts = {f"first 1/{k}": math.ceil(n_layer / k) for k in (8, 6, 5, 4, 3, 2)}
    parts = {name: range(n // 3, n) for name, n in firsts.items()}
    parts |= {f"{name}, all": range(n) for name, n in firsts.items()}
    parts["last two thirds"] = range(n_layer // 3, n_layer)
    parts |= {f"layer {i}": range(i, i + 1) for i in range(n_layer)}
    return {name: layers for name, layers in parts.items() if layers.stop <= n_read}


def main() -> None:
    """Read, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--count", type=int, default=40, help="questions")
    parser.add_argument("--layers", type=int, help="the first so many layers read; all of them by default")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    hits, options = Counter[str](), {"runtime": "cpu", "offline": True, "draft": "off", "n_threads": args.threads}
    with edgedec.load(args.model, n_ctx=args.tokens + 1024, **options) as engine:
        n_layer = engine.card.n_layer
        layers = range(args.layers or n_layer)
        parts, before = parts_of(n_layer, len(layers)), list[int]()
        with closing(engine.model.session(args.tokens + 1024)) as session:
            for kind, number in map(task, range(args.count)):
                prompt, asked = prompt_of(engine, kind, number, args.tokens)
                ids = np.array(prompt, np.int32)
                n_held = n_common(before, prompt, min(session.n_cached, len(prompt) - WINDOW))
                mass = masses(session, ids, n_held, layers)
                before = list(prompt)
                line, frame = line_of(engine, prompt, asked), frame_of(engine.tokenizer, prompt)
                for name, part in parts.items():
                    worth = mass[part.start : part.stop].max(axis=(0, 1))
                    for keep in _KEEPS:
                        hits[f"{name} {keep:g}"] += line <= set(kept_tokens(worth, frame, keep).tolist())
                        hits[f"{name} {keep:g} {kind}"] += line <= set(kept_tokens(worth, frame, keep).tolist())
    for name in parts:
        print(f"{name:>16}: " + ", ".join(f"{hits[f'{name} {keep:g}']} of {args.count} at {keep}" for keep in _KEEPS))
    figures = {"model": args.model, "tokens": args.tokens, "count": args.count, "layers": len(layers)}
    report({"benchmark": "reading_layers", **figures, "hits": dict(hits)}, args.json_out)


if __name__ == "__main__":
    main()
