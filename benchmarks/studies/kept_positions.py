"""Which positions the tokens that `prompt-keep` reads should have: those of the whole prompt, or their own places.

    python benchmarks/studies/kept_positions.py smollm2-135m --tokens 2000 --count 40 --keep 0.3 --json-out FILE

Of the made questions of benchmarks/answers/prompt_keep.py, the model evaluates the right answer behind the whole
prompt, and behind the kept tokens with both kinds of positions. Reported are the mean negative log-likelihood of an
answer in nats, how many answers are what the model would write, and for how many questions the first kind is likelier
than the second one. The first --layers layers choose the tokens. A document is read once for its questions.
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "answers"))

from prompt_keep import prompt_of, task

import edgedec
from edgedec.model import ForwardItem, RowGroup, Session, Span
from edgedec.sequence import n_common
from edgedec_apps.bench.provenance import report
from edgedec_methods.prompt_keep import WINDOW, frame_of, kept_tokens

_NO_ROWS = np.empty(0, np.int32)


def masses(session: Session, ids: NDArray[np.int32], n_held: int, layers: range) -> NDArray[np.float32]:
    """Return the mass of the first layers, f32[n_layers, n_head, n], by the rule of prompts in part.

    The session holds the prompt's first `n_held` tokens, and all of it then.
    """
    span, n = Span(leave=layers.stop), len(ids) - WINDOW
    mass = dict.fromkeys(layers, np.arange(1, WINDOW + 1, dtype=np.float32) / np.float32(WINDOW))
    if n_held < n:
        session.evaluate(ForwardItem(session, n_held, (RowGroup(ids[n_held:n], span=span),), _NO_ROWS))
    found = session.evaluate(ForwardItem(session, n, (RowGroup(ids[n:], span=span),), _NO_ROWS, mass=mass)).mass
    assert found is not None, "it was asked for"
    return found


def judged(session: Session, n_past: int, last: NDArray[np.int32], answer: list[int]) -> tuple[float, bool]:
    """Return an answer's negative log-likelihood behind the last tokens of a prompt, and whether each token is best."""
    rows = np.array([*last, *answer[:-1]], np.int32)
    wanted = np.arange(len(last) - 1, len(rows), dtype=np.int32)
    logits = session.forward(rows, n_past=n_past, rows=wanted).logits.astype(np.float64)
    top = logits.max(axis=1)
    own = logits[np.arange(len(answer)), answer] - top - np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return float(-own.sum()), bool((logits.argmax(axis=1) == answer).all())


def main() -> None:
    """Read, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--count", type=int, default=40, help="questions")
    parser.add_argument("--keep", type=float, default=0.3)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    options = {"runtime": "cpu", "offline": True, "draft": "off", "n_threads": args.threads}
    found: dict[str, list[tuple[float, bool]]] = {"whole prompt": [], "one behind the other": [], "of the prompt": []}
    with edgedec.load(args.model, n_ctx=args.tokens + 1024, n_parallel=3, **options) as engine:
        session = [engine.model.session(args.tokens + 1024) for _ in range(3)]
        before = list[int]()
        with closing(session[0]), closing(session[1]), closing(session[2]):
            for kind, number in map(task, range(args.count)):
                prompt, asked = prompt_of(engine, kind, number, args.tokens)
                ids, answer = np.array(prompt, np.int32), engine.tokenizer.encode(asked.answer, add_special=False)
                n_held = n_common(before, prompt, len(prompt) - WINDOW)
                before = list(prompt)
                mass = masses(session[0], ids, min(n_held, session[0].n_cached), range(args.layers))
                if n_held > session[1].n_cached:
                    n_held = 0
                session[1].forward(ids[n_held:-1], n_past=n_held, rows=_NO_ROWS)
                found["whole prompt"].append(judged(session[1], len(ids) - 1, ids[-1:], answer))
                worth = mass[args.layers // 3 :].max(axis=(0, 1))
                places = kept_tokens(worth, frame_of(engine.tokenizer, prompt), args.keep).astype(np.int32)
                for name, positions in (("one behind the other", None), ("of the prompt", places[:-1])):
                    rows = (RowGroup(ids[places[:-1]], positions=positions),)
                    session[2].evaluate(ForwardItem(session[2], 0, rows, _NO_ROWS))
                    found[name].append(judged(session[2], len(places) - 1, ids[-1:], answer))
    first, second = (np.array([nll for nll, _ in found[name]]) for name in ("one behind the other", "of the prompt"))
    n_likelier, n, gain = int((first < second).sum()), args.count, float((second - first).mean())
    figures = {
        name: {"nll": float(np.mean(rows, axis=0)[0]), "right": sum(r for _, r in rows)} for name, rows in found.items()
    }
    for name, each in figures.items():
        print(f"{name:>20}: {each['nll']:.3f} nats an answer, {each['right']} of {n} are what the model would write")
    print(f"one behind the other is likelier for {n_likelier} of {n}, by {gain:.3f} nats in the mean")
    setting = {"model": args.model, "tokens": args.tokens, "count": n, "keep": args.keep, "layers": args.layers}
    report({"benchmark": "kept_positions", **setting, "results": figures, "n_likelier": n_likelier}, args.json_out)


if __name__ == "__main__":
    main()
