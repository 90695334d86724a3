"""Measure what says of a text's steps, and of whole texts, that they are right: likelihood, probes, the judgement.

    python benchmarks/answers/step_scorers.py write qwen2.5-coder-1.5b --kind arithmetic --seed 1 --out steps.jsonl
    python benchmarks/answers/step_scorers.py fit steps.jsonl --kind arithmetic --probe probe.json
    python benchmarks/answers/step_scorers.py table steps.jsonl --probe probe.json --json-out FILE

`write` draws texts of made tasks and reads each once more, for what scorers read at the end of each of its lines; it
adds a line a task to its file and skips what the file has. `fit` makes the file of `scorer=probe:FILE` of one kind of
tasks and one seed, and probes of two layers beside it. `table` prints the AUROC of each scorer with 95 % intervals, a
bootstrap over tasks. A step is right where its text ends right. The tasks have other seeds than those of the searches.
"""

import argparse
import base64
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from made_pairs import auroc_of, pooled
from made_runs import N_CTX, add_line, figures, lines_of, load, open_tasks, prompt_of, question, texts_of
from numpy.typing import NDArray

import edgedec
from edgedec.sampling import log_probs
from edgedec_apps.bench.provenance import report
from edgedec_methods.arbitrage import logistic_weights
from edgedec_methods.judgement import chance_yes
from edgedec_methods.sampled_steps import forks, seeds_from, write_steps
from edgedec_methods.step_scores import probed

F64 = NDArray[np.float64]
COMPONENTS, RIDGE, FOLDS = (8, 32, 128), 0.01, 4


def write(args: argparse.Namespace) -> None:
    """Draw texts of each task, and note what scorers read of their steps."""
    key = {"model": args.model, "kind": args.kind, "seed": args.seed}
    with load(args, args.model) as engine:
        params = engine.requests.sampling(temperature=args.temperature, top_p=0.95)
        layers = [engine.card.n_layer // 2, engine.card.n_layer * 3 // 4]
        for task in open_tasks(args, key):
            with texts_of(engine, task, args.max_tokens) as texts:
                live = forks(texts, texts.begin(), args.texts)
                written = write_steps(texts, live, params, seeds_from(args.seed, args.texts), separator=None)
            session = engine.session(N_CTX)
            try:
                prompt = prompt_of(engine, task)
                rows = [
                    figures(task, texts.text(text))
                    | {"steps": steps_read(engine, session, prompt, text.token_ids, layers, args.judge)}
                    for text in written
                    if text.token_ids
                ]
            finally:
                session.close()
            add_line(args.out, key | {"task": task.id, "n_vocab": engine.card.n_vocab, "rows": rows})
            print(f"{task.id}: {sum(row['right'] for row in rows)} of {len(rows)} right", flush=True)


def steps_read(
    engine: edgedec.Engine, session: Any, prompt: list[int], ids: Sequence[int], layers: list[int], judge: bool
) -> list[dict[str, Any]]:
    """Return of each line of a text its likelihoods, what probes read at its end, and the model's judgement of it."""
    n_past = len(prompt) - 1
    if session.n_cached < n_past:
        session.forward(np.array(prompt[:-1], np.int32), n_past=0)
    read = session.forward(np.array([prompt[-1], *ids], np.int32), n_past=n_past, rows="all", taps=tuple(layers))
    logits, states = read.logits.copy(), {layer: read.hidden[layer].copy() for layer in layers}
    own = np.array([float(log_probs(row, np.array([token]))[0]) for row, token in zip(logits, ids, strict=False)])
    ends = [i + 1 for i, token in enumerate(ids[:-1]) if "\n" in engine.tokenizer.decode([token])] + [len(ids)]
    steps = list[dict[str, Any]]()
    for start, end in reversed(list(pairwise([0, *ends]))):  # a judgement takes the place of what is behind it
        step: dict[str, Any] = {"n": end, "last": float(own[start:end].mean()), "all": float(own[:end].mean())}
        step |= {f"layer {layer}": packed(states[layer][end]) for layer in layers} | {
            "logits": packed(probed(logits[end]))
        }
        if judge:
            asked = question(engine)
            row = session.forward(np.array([ids[end - 1], *asked.token_ids], np.int32), n_past=n_past + end).logits[-1]
            step["judge"] = chance_yes(row, asked)
        steps.append(step)
    return steps[::-1]


def packed(x: NDArray[Any]) -> str:
    """Return f16[n] as text."""
    return base64.b64encode(x.astype(np.float16).tobytes()).decode()


def unpacked(words: str) -> F64:
    """Return what packed() took."""
    return np.frombuffer(base64.b64decode(words), np.float16).astype(np.float64)


def fit(args: argparse.Namespace) -> None:
    """Fit a probe of each place where states were read: a logistic function of the first principal components.

    There are as many components as predict left-out tasks best.
    """
    lines = [line for line in lines_of(args.file) if (line["kind"], line["seed"]) == (args.kind, args.seed)]
    flat = [(i % FOLDS, step, row) for i, line in enumerate(lines) for row in line["rows"] for step in row["steps"]]
    fold, y = np.array([i for i, _, _ in flat]), np.array([row["right"] for _, _, row in flat], float)
    probes, found = dict[str, Any](), dict[str, Any]()
    for name in (name for name in flat[0][1] if name.startswith("layer ") or name == "logits"):
        x = np.array([unpacked(step[name]) for _, step, _ in flat])
        mean, (u, s, axes) = x.mean(axis=0), np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
        ones, values = np.ones((len(x), 1)), dict[int, float]()
        for n in COMPONENTS:
            z, folds = np.hstack([u[:, :n] * s[:n] / s[0], ones]), list[float]()
            ridge = np.array([RIDGE] * n + [1e-6])
            for out in (fold == k for k in range(FOLDS)):
                chances = z[out] @ logistic_weights(z[~out], y[~out], ridge)
                folds.append(pooled([list(zip(chances.tolist(), (y[out] > 0).tolist(), strict=True))]) or 0.0)
            values[n] = found[f"{name}, {n} components"] = round(fmean(folds), 4)
        n = max(values, key=values.__getitem__)
        z = np.hstack([u[:, :n] * s[:n] / s[0], ones])
        w = logistic_weights(z, y, np.array([RIDGE] * n + [1e-6]))
        weights = axes[:n].T @ w[:-1] / s[0]
        probes[name] = {"weights": weights.tolist(), "bias": float(w[-1] - weights @ mean)}
        print(name, values, flush=True)
    facts = {"model": lines[0]["model"], "kind": args.kind, "steps": len(flat), "tasks": len(lines)}
    document = facts | {"n_vocab": lines[0]["n_vocab"], "left-out tasks": found} | probes.pop("logits")
    args.probe.write_text(json.dumps(document | {"layers": probes}) + "\n", encoding="utf-8")


def scorers_of(probe: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], float]]:
    """Return by name what scores a step."""
    found: dict[str, Callable[[dict[str, Any]], float]] = {
        "likely": lambda step: float(step["all"]),
        "likely:last": lambda step: float(step["last"]),
        "judge": lambda step: float(step.get("judge", 0.0)),
    }
    for name, weights in (("logits", probe["weights"]), *((at, its["weights"]) for at, its in probe["layers"].items())):
        found[f"probe, {name}"] = partial(_probed, name, np.array(weights))
    return found


def _probed(name: str, weights: F64, step: dict[str, Any]) -> float:
    return float(unpacked(step[name]) @ weights)


def table(args: argparse.Namespace) -> None:
    """Print the AUROC of each scorer by kind of tasks: of all steps but the last, the first three, and whole texts."""
    probe = json.loads(args.probe.read_text(encoding="utf-8"))
    spans = {"steps": slice(0, -1), "step 1": slice(0, 1), "step 2": slice(1, 2), "step 3": slice(2, 3)}
    lines, tables = lines_of(args.file), dict[str, Any]()
    for kind, seed in sorted({(line["kind"], line["seed"]) for line in lines}):
        mine = [line for line in lines if (line["kind"], line["seed"]) == (kind, seed)]
        rows = [row for line in mine for row in line["rows"]]
        facts = {"tasks": len(mine), "texts": len(rows), "right": sum(row["right"] for row in rows)}
        rest: dict[str, Any] = {"steps": sum(len(row["steps"]) for row in rows)}
        print(f"\n{kind}, seed {seed}: {facts | rest}")
        for scorer, value in scorers_of(probe).items():
            judged = [line for line in mine if scorer != "judge" or "judge" in line["rows"][0]["steps"][0]]
            for span, cut in [*spans.items(), ("whole texts", slice(-1, None))] if judged else ():
                groups = [
                    [
                        (value(step), row["right"])
                        for row in line["rows"]
                        for step in (row["steps"] if span == "whole texts" else row["steps"][:-1])[cut]
                    ]
                    for line in judged
                ]
                groups = [group for group in groups if group]
                values = {name: x for name, x in auroc_of(groups).items() if x is not None}
                rest[f"{scorer}, {span}"] = auroc = {name: round(x, 3) for name, x in values.items()}
                print(f"{scorer:16} {span:12} {auroc}")
        tables[f"{kind}, seed {seed}"] = facts | rest
    document = {"benchmark": "step_scorers", "model": probe["model"], "tables": tables}
    document |= {"probe": {name: probe[name] for name in ("kind", "steps", "tasks", "left-out tasks")}}
    report(document, args.json_out)


def main() -> None:
    """Run what the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write")
    writing.add_argument("model")
    writing.add_argument("--kind", required=True)
    writing.add_argument("--seed", type=int, default=1)
    writing.add_argument("--tasks", type=int, default=40)
    writing.add_argument("--texts", type=int, default=8)
    writing.add_argument("--out", type=Path, required=True)
    writing.add_argument("--seconds", type=float, default=220.0, help="begin no task after so many seconds")
    writing.add_argument("--max-tokens", type=int, default=160)
    writing.add_argument("--temperature", type=float, default=0.7)
    writing.add_argument("--threads", type=int, default=2)
    writing.add_argument("--judge", action="store_true", help="ask the model about each step, too")
    writing.set_defaults(run=write)
    fitting = commands.add_parser("fit")
    fitting.add_argument("file", type=Path)
    fitting.add_argument("--kind", required=True)
    fitting.add_argument("--seed", type=int, default=1)
    fitting.add_argument("--probe", type=Path, required=True)
    fitting.set_defaults(run=fit)
    tabling = commands.add_parser("table")
    tabling.add_argument("file", type=Path)
    tabling.add_argument("--probe", type=Path, required=True)
    tabling.add_argument("--json-out", type=Path)
    tabling.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
