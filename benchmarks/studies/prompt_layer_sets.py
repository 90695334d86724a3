"""Measure what choosing layers by prompt would bring over one set for all: the most that FiRST's routers could gain.

    python benchmarks/studies/prompt_layer_sets.py smollm2-135m

In FiRST (Jain et al. 2024, arXiv:2410.12513) trained routers, one a layer, choose from a prompt which layers its text
leaves out. Here each layer is left out alone, and a set leaves out those that move the distributions least (KL): on
other texts or on the prompt, as could be known in use, or at the judged positions themselves, which no router knows.
All sets leave out the same number of layers, and are judged on the positions behind the prompt.

All of it is teacher-forced on the cpu runtime, so a second run gives the same figures. Ends with one line of JSON.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from trained_skipping import Texts, read_texts

from edgedec.gguf.layer_bytes import LayerBytes, layer_bytes
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import LayerSet, Session
from edgedec_apps.bench.provenance import provenance
from edgedec_apps.evaluation.layer_judge import Judge
from edgedec_apps.evaluation.layer_score import Score
from edgedec_models.folders import cache_folder
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.layer_skip.layer_sets import evenly_spaced, without


def scores_alone(judge: Judge, n_layer: int) -> list[Score]:
    """Return the scores of the sets without one layer each: the second to the last but one."""
    base = judge.trace(without(n_layer, []))
    return [judge.score(without(n_layer, [(layer, 0), (layer, 1)]), base) for layer in range(1, n_layer - 1)]


def least_harmful(harm: Sequence[float], n_out: int) -> LayerSet:
    """Return the set without the `n_out` layers of least harm.

    Args:
        harm: Of leaving out each layer alone: the second to the last but one.

    >>> least_harmful([3.0, 1.0, 2.0], 1).mlp.tolist()
    [True, True, False, True, True]
    """
    layers = sorted(range(len(harm)), key=lambda i: (harm[i], i))[:n_out]
    return without(len(harm) + 2, [(layer + 1, half) for layer in layers for half in (0, 1)])


def behind(text: Score, prompt: Score) -> Score:
    """Return the score of the positions behind a prompt from those of the whole text and of the prompt.

    >>> behind(Score(0.5, 0.5, 1.0, 40), Score(0.75, 0.25, 0.5, 20))
    Score(agreement=0.25, overlap=0.75, kl=1.5, n_positions=20)
    """
    n = text.n_positions - prompt.n_positions

    def rest(of_text: float, of_prompt: float) -> float:
        return (of_text * text.n_positions - of_prompt * prompt.n_positions) / n

    return Score(
        rest(text.agreement, prompt.agreement), rest(text.overlap, prompt.overlap), rest(text.kl, prompt.kl), n
    )


def study(session: Session, sizes: LayerBytes, texts: Texts, n_prompt: int, n_out: int) -> list[dict[str, Any]]:
    """Return figures for each way to choose which `n_out` layers to leave out."""
    n_layer, n = sizes.n_layer, len(texts.judged)
    pairs = [(Judge(session, [text]), Judge(session, [text[:n_prompt]])) for text in texts.judged]
    alone = [[scores_alone(judge, n_layer) for judge in pair] for pair in pairs]
    harms = [[behind(*scores).kl for scores in zip(*pair, strict=True)] for pair in alone]
    elsewhere = [score.kl for score in scores_alone(Judge(session, texts.trained), n_layer)]
    chosen = {
        "evenly spaced": [evenly_spaced(n_layer, n_out)] * n,
        "one for all, of other texts": [least_harmful(elsewhere, n_out)] * n,
        "one for each, of its prompt": [least_harmful([score.kl for score in pair[1]], n_out) for pair in alone],
        "one for all, of the judged positions": [least_harmful(np.mean(harms, axis=0).tolist(), n_out)] * n,
        "one for each, of the judged positions": [least_harmful(harm, n_out) for harm in harms],
    }
    rows: list[dict[str, Any]] = []
    for name, sets in chosen.items():
        scores = [
            behind(text.score(layers), prompt.score(layers)) for (text, prompt), layers in zip(pairs, sets, strict=True)
        ]
        figures = {
            "share": float(np.mean([sizes.share(layers) for layers in sets])),
            "kl": float(np.mean([score.kl for score in scores])),
            "top1": float(np.mean([score.agreement for score in scores])),
        }
        n_positions = sum(score.n_positions for score in scores)
        rows.append(
            {
                "set": name,
                "left_out": [np.flatnonzero(~layers.mlp).tolist() for layers in sets],
                "n_positions": n_positions,
                **figures,
            }
        )
        print(f"{name}: {', '.join(f'{key} {value:.3f}' for key, value in figures.items())}", flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--window", type=int, default=128, help="tokens of a text")
    parser.add_argument("--prompt", type=int, default=64, help="of these, the leading ones, not judged")
    parser.add_argument("--texts", type=int, default=4, help="that are judged on, and as many others to choose on")
    parser.add_argument("--layers-out", type=int, default=7)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    path = resolve(args.model, ResolveOptions(cache_folder(), offline=True))
    options = LoadOptions(n_ctx=args.window, max_rows=64, n_threads=args.threads, cache_dir=cache_folder())
    with Cpu().load(path, options) as model:
        texts = read_texts(model, args.window, args.texts, args.texts)
        found = study(model.session(args.window), layer_bytes(path), texts, args.prompt, args.layers_out)
    print(json.dumps({"benchmark": "prompt_layer_sets", **vars(args), "sets": found, **provenance()}))


if __name__ == "__main__":
    main()
