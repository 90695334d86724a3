"""Measure methods of two models (reflective, anchored) on made tasks: right answers, equal texts, and CPU seconds.

    python benchmarks/answers/two_models.py qwen2.5-coder-1.5b --kind arithmetic --out FILE.jsonl --json-out FILE \
        --methods '{"reflective": {"draft_model": "qwen2.5-coder-0.5b", "weight": 0.3}}'

Each task is answered greedily by the model alone, then with each of the methods, which are those of `Lossy(methods=)`.
One model is loaded after the other, and every answer reads its prompt anew. The script adds a line a task and way,
skips what FILE has, and ends with a row for each way: an exact McNemar test against the model alone, and how many texts
are that model's. The time is CPU seconds of the process's one thread.
"""

import argparse
import json
from pathlib import Path
from time import process_time
from typing import Any

from made_pairs import rows_of_ways
from made_runs import N_CTX, STOPS, add_line, figures, lines_of, open_tasks

import edgedec
from edgedec.api.options import Lossy
from edgedec_apps.bench.provenance import report

ALONE = "alone"


def write(args: argparse.Namespace, way: str) -> None:
    """Answer the tasks in one way."""
    lossy = Lossy() if way == ALONE else Lossy(methods=json.loads(way))
    with edgedec.load(
        args.model, runtime="cpu", offline=True, draft="off", n_ctx=N_CTX, n_threads=args.threads, lossy=lossy
    ) as engine:
        for task in open_tasks(args, {"model": args.model, "kind": args.kind, "way": way}):
            engine.generate("x", max_tokens=1)  # so that no prompt is there already
            messages, stop = [{"role": "user", "content": task.prompt}], STOPS.get(task.kind, ())
            began = process_time()
            found = engine.chat(messages, temperature=0, max_tokens=args.max_tokens, stop=stop)
            seconds = round(process_time() - began, 3)
            line: dict[str, Any] = {"model": args.model, "kind": args.kind, "way": way, "task": task.id}
            line |= figures(task, found.text) | {"seconds": seconds, "tokens": len(found.token_ids)}
            line |= {"text": found.text, "told": found.stats.explanation}
            add_line(args.out, line)
            print(task.id, way, line["right"], seconds, line["told"], flush=True)


def main() -> None:
    """Answer the tasks in every way, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--methods", nargs="+", default=[], help="JSON objects: what Lossy(methods=) takes")
    parser.add_argument("--kind", default="arithmetic")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no task after so many seconds")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    for way in (ALONE, *args.methods):
        write(args, way)
    lines = lines_of(args.out)
    alone = {line["task"]: line["text"] for line in lines if line["way"] == ALONE}
    for line in lines:
        line["same"] = line["text"] == alone.get(line["task"])
    rows = rows_of_ways(lines, ["seconds", "tokens", "same"], [ALONE])
    report({"benchmark": "two_models", "model": args.model, "kind": args.kind, "rows": rows}, args.json_out)


if __name__ == "__main__":
    main()
