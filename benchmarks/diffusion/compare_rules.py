"""Compare the rules of denoising: right answers against tokens a forward, and what a forward of a block costs.

    python benchmarks/diffusion/compare_rules.py small.gguf --json rules.json --plot rules.svg
    python benchmarks/diffusion/compare_rules.py small.gguf --rules schedule:1 learned:filter.json
    python benchmarks/diffusion/compare_rules.py whole.gguf --length 8 --context 32 --rules threshold threshold,window:4
    python benchmarks/diffusion/compare_rules.py lined.gguf --lined --length 16 --context 32 --rules threshold lines:0.3
    python benchmarks/diffusion/compare_rules.py plain.gguf --rules plain --json rules.json
    python benchmarks/diffusion/compare_rules.py small.gguf --cost smollm2-135m --json rules.json

The answers are those to the made tasks of train_small.py, from another seed, written greedily on one thread. "plain" is
the rule of an ordinary model, which writes from left to right. What the JSON file says of other models stays there.
With --cost, forwards of one row and of a block of rows are timed in turn on any model, in seconds of the processor: a
diffusion model of its size pays on this machine where it commits more tokens a forward than such a forward costs steps.
"""

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from small_tasks import LINED, TASKS, is_right, made

import edgedec
from edgedec.api.options import Lossy
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import ForwardItem, RowGroup
from edgedec.pictures import Block
from edgedec_apps.plots import COLORS, picture, require_picture
from edgedec_runtimes.cpu.runtime import Cpu

RULES = (
    *("schedule:1", "schedule:2", "schedule:4", "threshold:0.9", "threshold:0.6", "ascending:2", "eoser:0.01"),
    *("credit:0.9", "credit:0.6", "coherent:4", "coherent:8", "local_leap:0.75", "redundancy:0.8", "bounded:0.6"),
    *("prophet:7.5", "prophet:4", "entropy:0.5", "entropy_bound:0.5", "adaptive:4", "near_first:0.4", "explore:0.9"),
    *("parallel:2", "parallel:4", "free_dave:3"),
)  # lines is not among them: its blocks end with lines, and it is compared by --lined
_SEED, _MOST_TOKENS, _CACHED, _ROUNDS = 10**6, 32, 256, 5


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule gave: the share of right answers, by task and of all; tokens and evaluated rows a forward."""

    model: str
    rule: str
    right: float
    right_of: dict[str, float]
    tokens_a_forward: float
    rows_a_forward: float


def found(path: Path, rule: str, n: int, length: int, n_ctx: int, kinds: Iterable[str]) -> Found:
    """Answer `n` tasks of each kind with a rule."""
    right, sums = dict.fromkeys(kinds, 0), np.zeros(3, np.int64)
    lossy = Lossy(methods=None if rule == "plain" else {"diffusion": {"denoise": rule, "length": length}})
    with edgedec.load(path, runtime="cpu", n_ctx=n_ctx, n_threads=1, lossy=lossy, draft="off") as engine:
        for kind in right:
            for prompt, answer in made(kind, n, _SEED):
                text = engine.generate(prompt, temperature=0.0, max_tokens=_MOST_TOKENS)
                right[kind] += is_right(prompt, answer, text.text)
                counts = re.match(
                    r"diffusion: (\d+) tokens? in (\d+) forwards.* (\d+) rows were evaluated",
                    (text.stats.explanation or [""])[-1],
                )
                n_tokens = text.stats.n_generated_tokens
                sums += [int(x) for x in counts.groups()] if counts else [n_tokens, n_tokens, n_tokens]
    shares = {kind: count / n for kind, count in right.items()}
    tokens, rows = sums[[0, 2]] / sums[1]
    return Found(path.stem, rule, sum(shares.values()) / len(shares), shares, float(tokens), float(rows))


def costs(name: str, n_threads: int, sizes: list[int]) -> dict[int, float]:
    """Return how many single steps a forward of a block costs, by its rows: medians of forwards made in turn."""
    path = resolve(name, ResolveOptions())
    seconds: dict[int, list[float]] = {n: [] for n in (1, *sizes)}
    with Cpu().load(path, LoadOptions(n_ctx=512, n_threads=n_threads, max_rows=max(sizes))) as model:
        session = model.session(512)
        session.forward(np.arange(10, 10 + _CACHED, dtype=np.int32), n_past=0)
        for _ in range(_ROUNDS):
            for n, times in seconds.items():
                tokens, begun = np.arange(5, 5 + n, dtype=np.int32), process_time()
                block = None if n == 1 else Block(n, 1, 1, mutual=True)
                session.evaluate(ForwardItem(session, _CACHED, (RowGroup(tokens, sees=block),), "all"))
                times.append(process_time() - begun)
    return {n: median(times) / median(seconds[1]) for n, times in seconds.items()}


def draw(path: Path, results: list[Found]) -> None:
    """Draw right answers against tokens a forward, each rule as a number that the legend explains."""
    with picture(path, (9.0, 6.0), "Rules of denoising on made tasks") as figure:
        axes = figure.add_subplot()
        for i, its in enumerate(sorted(results, key=lambda its: its.tokens_a_forward)):
            x, y, name = its.tokens_a_forward, 100 * its.right, f"{i + 1}  {its.rule.removesuffix('.json')}"
            axes.plot(x, y, ".", color=COLORS[i % len(COLORS)], label=name)
            axes.annotate(str(i + 1), (x, y), (0, (5, -11, 13, -19)[i % 4]), textcoords="offset points", fontsize=7)
        axes.set(xlabel="tokens a forward", ylabel="right answers (%)", xlim=(0, None))
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def main() -> None:
    """Answer, time, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tasks", type=int, default=20, help="of each kind")
    parser.add_argument("--rules", nargs="*", default=RULES)
    parser.add_argument("--length", type=int, default=32, help="positions of a block where rows see the whole text")
    parser.add_argument("--context", type=int, default=128, help="most tokens of a text with its prompt")
    parser.add_argument("--cost", nargs="*", default=[], help="models whose forwards are timed")
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 8, 16, 32, 256], help="of these forwards")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lined", action="store_true", help="the tasks whose answers have lines")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    require_picture(options.plot)
    results, kinds = [], tuple(LINED if options.lined else TASKS)
    for rule in options.rules:
        results.append(result := found(options.gguf, rule, options.tasks, options.length, options.context, kinds))
        of = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in result.right_of.items())
        print(
            f"{rule:18} {100 * result.right:5.1f} % right ({of}), {result.tokens_a_forward:.2f} tokens and "
            f"{result.rows_a_forward:.1f} rows a forward",
            flush=True,
        )
    steps = {name: costs(name, options.threads, options.rows) for name in options.cost}
    for name, by_rows in steps.items():
        print(f"{name}: " + ", ".join(f"{n} rows cost {x:.2f} steps" for n, x in by_rows.items()))
    if options.json is not None:
        written = json.loads(options.json.read_text()) if options.json.exists() else {"rules": [], "steps_by_rows": {}}
        others = [its for its in written["rules"] if its["model"] != options.gguf.stem]
        written["rules"] = others + [asdict(result) for result in results]
        written["steps_by_rows"] |= steps
        written |= {"tasks": options.tasks, "threads": options.threads}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    if options.plot is not None:
        draw(options.plot, results)


if __name__ == "__main__":
    main()
