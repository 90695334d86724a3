"""Measure what drafting with the target's own layers costs and brings: T(1, layers), agreement, tokens per second.

    edgedec tune-skip qwen2.5-coder-1.5b
    python benchmarks/speed/layer_skip.py qwen2.5-coder-1.5b --per-task 1 --max-tokens 96

Every prompt runs plainly and with each way to draft, in changing order; a text that differs ends the script with exit
code 1. Ends with one line of JSON.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import edgedec
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import LayerSet
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, prepare, read_prompts
from edgedec_apps.bench.provenance import report
from edgedec_apps.evaluation.layer_search import first_layers, late_layers
from edgedec_apps.evaluation.tune_skip import part_cost
from edgedec_runtimes.layer_skip.layer_sets import evenly_spaced, left_out, tuned_set

WAYS = ("skip", "exit", "suffix+skip", "suffix", "auto")


def costs(engine: edgedec.Engine, path: Path) -> dict[str, dict[str, float]]:
    """Return bytes and time of a token through sets of half-layers, as shares of a whole one's."""
    sizes, n = layer_bytes(path), engine.card.n_layer
    sets: dict[str, LayerSet] = {
        "evenly 1/4": evenly_spaced(n, n // 4),
        "late 1/4": late_layers(n, n // 4),
        "first 1/2": first_layers(n, n // 2),
        "first 1/4": first_layers(n, n // 4),
    }
    tuned = tuned_set(cache_folder(), engine.card)
    if tuned is not None:
        sets["tuned"] = tuned.layers
    session = engine.session(256)
    found = {}
    for name, layers in sets.items():
        found[name] = {"share": sizes.share(layers), "cost": part_cost(session, layers)}
        print(f"{name:12} reads {found[name]['share']:.3f}, takes {found[name]['cost']:.3f}", flush=True)
    session.close()
    if tuned is not None:
        found["tuned"]["agreement"] = tuned.agreement
        print(f"tuned: leaves out {left_out(tuned.layers)}, agreement {tuned.agreement:.3f}", flush=True)
    return found


def measure(args: argparse.Namespace, way: str, requests: list[Any]) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    """Return the texts of one way to draft, and its figures against plain decoding in turn with it."""
    texts, ratios, accepted, steps = [], list[float](), 0, 0
    with edgedec.load(args.model, draft=way, runtime="cpu", offline=True, n_threads=args.threads) as engine:
        for i, request in enumerate(requests):
            engine.forget()
            rates, found = {}, {}
            for draft in (True, False) if i % 2 else (False, True):
                options = {"temperature": args.temperature, "seed": request.seed, "max_tokens": args.max_tokens}
                found[draft] = engine.generate(request.token_ids, draft=draft, ignore_end=True, **options)
                rates[draft] = found[draft].stats.tokens_per_s
            if found[True].token_ids != found[False].token_ids:
                print(f"{way}: the text of {request.id} differs", flush=True)
                sys.exit(1)
            texts.append(found[True].token_ids)
            ratios.append(rates[True] / rates[False])
            accepted += found[True].stats.n_accepted_tokens
            steps += found[True].stats.n_steps
    figures = {
        "speedup": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "accepted_per_step": accepted / max(1, steps),
    }
    return texts, figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ways", default=",".join(WAYS), help="drafters to measure; empty for the costs alone")
    args = parser.parse_args()
    path = resolve(args.model, ResolveOptions(cache_folder(), offline=True))
    with edgedec.load(args.model, draft="off", runtime="cpu", offline=True, n_threads=args.threads) as engine:
        found = costs(engine, path)
        requests = list(prepare(engine, read_prompts(args.prompts, args.per_task), args.max_tokens))
    results = {}
    for way in filter(None, args.ways.split(",")):
        _, results[way] = measure(args, way, requests)
        print(f"{way:12} {results[way]}", flush=True)
    settings = {name: getattr(args, name) for name in ("model", "max_tokens", "temperature")}
    report({"benchmark": "layer_skip", "n_prompts": len(requests), **settings, "costs": found, "ways": results}, None)


if __name__ == "__main__":
    main()
