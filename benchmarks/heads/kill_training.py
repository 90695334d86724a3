"""Kill the training of a drafter at random moments, and compare the drafter with that of an undisturbed training.

    python benchmarks/heads/kill_training.py smollm2-135m.gguf --tokens 12000 --answer-tokens 64
    python benchmarks/heads/kill_training.py smollm2-135m.gguf --tokens 12000 --answer-tokens 64 --kind model

First a training runs undisturbed, and says how long its parts take: collecting, learning, writing. Then another one is
killed (SIGKILL) ten times, a third of them in each part: after so many files were put in their places there, and so
many seconds later, both drawn at random. What is left is trained to the end. The exit status is 1 where a tensor of the
two drafters differs in a bit, or where a file of a killed process is left.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.heads.killed_training import PARTS, Training, kill, train

from edgedec.gguf.file import read_gguf

SUFFIXES = {"head": "", "block": "", "model": ".gguf"}


def run(training: Training, n_kills: int, seed: int) -> dict[str, object]:
    """Return what happened: the seconds of the undisturbed parts, each kill, and whether the tensors are the same."""
    draw, kills = Random(seed), []
    whole, torn = (
        replace(training, out=training.out / f"{name}{SUFFIXES[training.kind]}") for name in ("whole", "torn")
    )
    seconds = train(whole)
    print(json.dumps({"seconds": {part: round(spent, 1) for part, spent in seconds.items()}}), flush=True)
    parts = sorted((PARTS[i % len(PARTS)] for i in range(n_kills)), key=PARTS.index)
    for part in parts:
        after_s, files = draw.uniform(0, seconds[part] / parts.count(part)), draw.randrange(3)
        died_in = kill(torn, part, after_s, files)
        kills.append({"wanted": part, "after_s": round(after_s, 2), "files": files, "died_in": died_in or "not killed"})
        print(json.dumps(kills[-1]), flush=True)
    start = time.monotonic()
    train(torn)
    last_s = time.monotonic() - start
    left = [str(path) for path in training.out.rglob("*") if path.is_file() and path.suffix in (".tmp", ".lock")]
    same_bits = tensors(whole.out) == tensors(torn.out)
    return {"kills": len(kills), "last_run_s": round(last_s, 1), "same_bits": same_bits, "left": left}


def tensors(drafter: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of a head's folder or of a draft model's file."""
    if drafter.is_dir():
        return {"model.safetensors": (drafter / "model.safetensors").read_bytes()}
    gguf = read_gguf(drafter)
    return {name: gguf.read_tensor_bytes(name) for name in gguf.tensors}


def main() -> int:
    """Parse the command line, run, and print a line of JSON for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the target's GGUF")
    parser.add_argument("--kind", choices=sorted(SUFFIXES), default="head", help="what is trained (default: head)")
    parser.add_argument("--prompts", type=Path, help="a file of prompts (default: the target writes them)")
    parser.add_argument("--tokens", type=int, default=12_000, help="tokens of answers (default: 12000)")
    parser.add_argument("--answer-tokens", type=int, default=64, help="most tokens of an answer (default: 64)")
    parser.add_argument("--passes", type=float, default=1.0, help="how often each answer is learned (default: 1)")
    parser.add_argument("--save-every", type=float, default=1.0, help="seconds between checkpoints (default: 1)")
    parser.add_argument("--kills", type=int, default=10, help="how often the training is killed (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-training-") as folder:
        training = Training(
            model=options.model,
            out=Path(folder),
            kind=options.kind,
            prompts=options.prompts,
            n_tokens=options.tokens,
            n_answer=options.answer_tokens,
            n_passes=options.passes,
            save_every_s=options.save_every,
        )
        found = run(training, options.kills, options.seed)
    print(json.dumps(found))
    return 0 if found["same_bits"] and not found["left"] else 1


if __name__ == "__main__":
    sys.exit(main())
