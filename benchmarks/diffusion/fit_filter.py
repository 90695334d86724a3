"""Fit the filter of `diffusion:learned:FILE` for a model of blocks: which positions have their last token already.

    python benchmarks/diffusion/fit_filter.py small.gguf filter.json

Made tasks, from another seed than those of compare_rules.py, are answered with one token a pass. Each pass says for
each masked position what the filter reads, and at the end of the block whether its token was the last one.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from small_tasks import TASKS, made
from torch import nn
from torch.nn import functional

from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, RowGroup, Session
from edgedec.pictures import Block
from edgedec_methods.diffusion.learned import N_FEATURES, features
from edgedec_runtimes.cpu.runtime import Cpu

F64 = NDArray[np.float64]
_SEED, _N_CTX, _MOST_BLOCKS, _STEPS = 2 * 10**6, 128, 2, 3000


def examples(session: Session, mask: int, size: int, ids: list[int]) -> Iterator[tuple[F64, NDArray[np.bool_]]]:
    """Yield what the filter reads in each pass behind a prompt, and whether the tokens were the last ones."""
    grid = Block(size, 1, 1, mutual=True)
    for _ in range(_MOST_BLOCKS):
        start = len(ids) // size * size
        ids += [mask] * (start + size - len(ids))
        passes = []
        while mask in ids[start:]:
            places = np.flatnonzero(np.array(ids[start:]) == mask)
            tokens, rows = np.array(ids, np.int32), (start + places).astype(np.int32)
            item = ForwardItem(session, 0, (RowGroup(tokens, sees=grid),), rows)
            logits = session.evaluate(item).logits.astype(np.float64)
            logits[:, mask] = -np.inf
            best, sure = logits.argmax(1), 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
            passes.append((places, best, features(size, places, sure)))
            ids[start + int(places[sure.argmax()])] = int(best[sure.argmax()])
        last = np.array(ids[start:])
        for places, best, found in passes:
            yield found, best == last[places]
        if session.model.tokenizer.is_end(ids[-1]):
            return


def gathered(path: Path, n: int) -> tuple[F64, NDArray[np.bool_]]:
    """Return the examples of `n` tasks of each kind."""
    found: list[tuple[F64, NDArray[np.bool_]]] = []
    with Cpu().load(path, LoadOptions(n_ctx=_N_CTX, n_threads=1)) as model:
        facts, session = model.card.methods["diffusion"], model.session(_N_CTX)
        for kind in TASKS:
            for prompt, _ in made(kind, n, _SEED):
                ids = model.tokenizer.encode(prompt, parse_special=True)
                found += examples(session, facts["mask"], facts["block"], ids)
    return np.concatenate([x for x, _ in found]), np.concatenate([y for _, y in found])


def main() -> None:
    """Gather, fit, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("filter", type=Path)
    parser.add_argument("--tasks", type=int, default=40, help="of each kind")
    parser.add_argument("--hidden", type=int, default=16)
    options = parser.parse_args()
    x, y = (torch.tensor(array, dtype=torch.float32) for array in gathered(options.gguf, options.tasks))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = nn.Sequential(nn.Linear(N_FEATURES, options.hidden), nn.ReLU(), nn.Linear(options.hidden, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-3)
    for _ in range(_STEPS):
        chosen = torch.randint(len(x), (512,))
        loss = functional.binary_cross_entropy_with_logits(network(x[chosen])[:, 0], y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    first, last = network[0], network[2]
    values = {"first": first.weight.T, "bias": first.bias, "second": last.weight[0], "last": last.bias[0]}
    options.filter.write_text(json.dumps({name: value.tolist() for name, value in values.items()}) + "\n")
    print(f"{len(x)} positions, {y.mean():.1%} with their last token; loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
