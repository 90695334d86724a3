"""Train a small diffusion model on made tasks, on one core, and write it as a GGUF that edgedec runs.

    python benchmarks/diffusion/train_small.py small.gguf --minutes 22
    python benchmarks/diffusion/train_small.py whole.gguf --sees whole --width 192 --layers 6 --minutes 5
    python benchmarks/diffusion/train_small.py lined.gguf --sees whole --lined --width 192 --layers 6 --minutes 5
    python benchmarks/diffusion/train_small.py plain.gguf --sees before --width 192 --layers 6 --minutes 5

The network is a Qwen3, of 11 million parameters where no other size is given. What its rows see makes the kind:

- block: their block of 16 positions and the block before, as in block diffusion (Arriola et al. 2025,
  arXiv:2503.09573). A sequence of two blocks stands there with a random part of its answer masked, and its first block
  once more, clean; a noisy row sees its own noisy block and the clean one before.
- whole: the whole text, as in LLaDA (Nie et al. 2025, arXiv:2502.09992). Half of the texts end where the answer does.
- front: known tokens before masks, and of either those before it, as in WeDLM (Liu et al. 2025, arXiv:2512.22737).
- before: what is before it; each row says the next token, as in an ordinary model. It is the comparison.

A masked row is trained to say its own token. Losses on the answer only. The words of a prompt are tokens of their own,
all else is bytes. A checkpoint beside the result is written every minute, so a run that was stopped goes on.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic, process_time

import numpy as np
import torch
from numpy.typing import NDArray
from small_tasks import LINED, TASKS
from torch import Tensor, nn
from torch.nn import functional

from edgedec.gguf.tensor_types import GGMLType
from edgedec_export import gguf_writer as out
from edgedec_export.training.optimizing import Optimizers

BLOCK, LENGTH = 16, 32
EOS, SPACE, BYTES, MASK = 2, 3, 4, 260
WORDS = {word: MASK + 1 + i for i, word in enumerate((*(f"{k}:" for k in TASKS), "=", *(f"{k}:" for k in LINED)))}
N_VOCAB, HEAD_DIM, ROPE_BASE, EPSILON = 288, 32, 10_000.0, 1e-6
NOTHING = -100  # a row that is trained to say nothing


@dataclass(frozen=True, slots=True)
class Example:
    """Rows of one sequence: token ids, positions, which rows each sees, and what each is to say."""

    ids: list[int]
    places: list[int]
    sees: NDArray[np.bool_]
    wanted: list[int]


def token_ids(text: str) -> list[int]:
    """Return the ids of a text: words of prompts, and bytes."""
    ids: list[int] = []
    for part in re.split("(" + "|".join(WORDS) + ")", text):
        ids += [WORDS[part]] if part in WORDS else [SPACE if byte == 32 else BYTES + byte for byte in part.encode()]
    return ids


def hidden(rng: Random, row: list[int], places: list[int]) -> list[int]:
    """Return a sequence with a random part of some of its positions masked, at least one."""
    share = rng.random()
    chosen = {i for i in places if rng.random() < share} or {*rng.sample(places, min(1, len(places)))}
    return [MASK if i in chosen else token for i, token in enumerate(row)]


def said(masked: list[int], row: list[int]) -> list[int]:
    """Return what masked rows are to say."""
    return [token if its == MASK else NOTHING for its, token in zip(masked, row, strict=True)]


def in_blocks(rng: Random, row: list[int], n_prompt: int, n_text: int) -> Example:
    """Return the rows of block diffusion: of a text of two blocks the first, clean, and both with masks."""
    first = hidden(rng, row[:BLOCK], [*range(n_prompt, BLOCK)])
    if n_text < BLOCK:  # an end belongs to the block
        return Example(first, [*range(BLOCK)], np.ones((BLOCK, BLOCK), np.bool_), said(first, row[:BLOCK]))
    second = hidden(rng, row[BLOCK:], [*range(max(0, n_prompt - BLOCK), BLOCK)])
    ids, part = [*row[:BLOCK], *first, *second], np.arange(3 * BLOCK) // BLOCK
    sees = (part[:, None] == part[None, :]) | ((part[:, None] == 2) & (part[None, :] == 0))
    return Example(ids, [*range(BLOCK), *range(LENGTH)], sees, [*[NOTHING] * BLOCK, *said(ids[BLOCK:], row)])


def whole(rng: Random, row: list[int], n_prompt: int, n_text: int) -> Example:
    """Return the rows of a text that see each other."""
    end = rng.choice((LENGTH, rng.randint(n_text + 1, LENGTH)))
    masked = hidden(rng, row, [*range(n_prompt, end)])
    return Example(masked, [*range(LENGTH)], np.tile(np.arange(LENGTH) < end, (LENGTH, 1)), said(masked, row))


def front(rng: Random, row: list[int], n_prompt: int, n_text: int) -> Example:
    """Return rows that see known tokens before masks; the last block is masked in part, and what is before it known."""
    start = rng.choice(range(n_prompt, n_text + 1, BLOCK))
    end = min(start + BLOCK, LENGTH)
    masked = hidden(rng, row, [*range(start, end)])
    order = np.lexsort((np.arange(LENGTH), np.array(masked) == MASK, np.arange(LENGTH) >= end))
    rank = np.argsort(order)
    return Example(masked, [*range(LENGTH)], rank[None, :] <= rank[:, None], said(masked, row))


def before(rng: Random, row: list[int], n_prompt: int, n_text: int) -> Example:
    """Return the rows of an ordinary model."""
    wanted = [row[i + 1] if n_prompt <= i + 1 <= n_text else NOTHING for i in range(LENGTH - 1)]
    return Example(row, [*range(LENGTH)], np.tri(LENGTH, dtype=np.bool_), [*wanted, NOTHING])


KINDS: dict[str, Callable[[Random, list[int], int, int], Example]] = {
    "block": in_blocks,
    "whole": whole,
    "front": front,
    "before": before,
}


def batch(rng: Random, n: int, kind: str, *, lined: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """Yield `n` sequences in groups of one length: int[m, r] ids, int[r] places, bool[m, 1, r, r] sees, int[m, r]."""
    groups: dict[int, list[Example]] = defaultdict(list)
    for _ in range(n):
        prompt, answer = rng.choice(list((LINED if lined else TASKS).values()))(rng)
        begun, rest = token_ids(prompt), token_ids(answer)
        row = [*begun, *rest, *[EOS] * (LENGTH - len(begun) - len(rest))]
        example = KINDS[kind](rng, row, len(begun), len(begun) + len(rest))
        groups[len(example.ids)].append(example)
    for group in groups.values():
        ids, wanted = torch.tensor([its.ids for its in group]), torch.tensor([its.wanted for its in group])
        yield ids, torch.tensor(group[0].places), torch.tensor(np.stack([its.sees for its in group])[:, None]), wanted


class Layer(nn.Module):  # type: ignore[misc]  # torch may be missing
    """A layer of a Qwen3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(width, EPSILON), nn.RMSNorm(width, EPSILON)
        self.attn_q_norm, self.attn_k_norm = nn.RMSNorm(HEAD_DIM, EPSILON), nn.RMSNorm(HEAD_DIM, EPSILON)
        self.attn_q, self.attn_k, self.attn_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.attn_output = nn.Linear(width, width, bias=False)
        self.ffn_gate, self.ffn_up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, sees: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Return what leaves the layer."""
        y = self.attn_norm(x)
        q, k, v = (m(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for m in (self.attn_q, self.attn_k, self.attn_v))
        q, k = rotated(self.attn_q_norm(q), turns), rotated(self.attn_k_norm(k), turns)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.attn_output(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.ffn_down(functional.silu(self.ffn_gate(y)) * self.ffn_up(y))


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of heads to their positions."""
    first, second = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-second, first], -1) * turns[1]


class Network(nn.Module):  # type: ignore[misc]  # torch may be missing
    """The network."""

    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(N_VOCAB, width)
        self.blk = nn.ModuleList(Layer(width) for _ in range(n_layers))
        self.output_norm = nn.RMSNorm(width, EPSILON)
        self.output = nn.Linear(width, N_VOCAB, bias=False)
        nn.init.normal_(self.token_embd.weight, std=0.5)

    def forward(self, ids: Tensor, places: Tensor, sees: Tensor) -> Tensor:
        """Return f32[m, r, width]: what leaves the layers, normed."""
        angles = places[:, None] / ROPE_BASE ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.cat([angles, angles], -1)
        x = self.token_embd(ids)
        for layer in self.blk:
            x = layer(x, sees, (angles.cos(), angles.sin()))
        return self.output_norm(x)

    def loss(self, groups: Iterator[tuple[Tensor, ...]]) -> Tensor:
        """Return the mean cross-entropy of what rows are to say."""
        rows, wanted = [], []
        for ids, places, sees, its in groups:
            rows.append(self(ids, places, sees)[its != NOTHING])
            wanted.append(its[its != NOTHING])
        return functional.cross_entropy(self.output(torch.cat(rows)), torch.cat(wanted))


def _bytes(data: NDArray[np.float32]) -> Iterator[bytes]:
    yield data.tobytes()


def write(network: Network, kind: str, path: Path) -> None:
    """Write the network as a GGUF."""
    width = network.output.in_features
    facts: dict[str, out.Metadata] = {
        "block": {"diffusion.block_size": BLOCK},
        "whole": {"qwen3.attention.causal": False},
        "front": {"diffusion.window_size": BLOCK},
    }
    if kind in facts:
        facts[kind] |= {"diffusion.shift_logits": False, "tokenizer.ggml.mask_token_id": MASK}
    tokens = ["<unk>", "<s>", "</s>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256)), "<mask>"]
    tokens += [*WORDS]
    kinds = [2, 3, 3, 1, *[6] * 256, 3, *[4] * len(WORDS), *[5] * (N_VOCAB - len(tokens))]
    tokens += [f"[unused{i}]" for i in range(N_VOCAB - len(tokens))]
    entries: out.Metadata = {
        "general.architecture": "qwen3",
        "general.name": f"made tasks, {kind}",
        **facts.get(kind, {}),
        "qwen3.context_length": 1024,
        "qwen3.embedding_length": width,
        "qwen3.block_count": len(network.blk),
        "qwen3.feed_forward_length": 3 * width,
        "qwen3.attention.head_count": width // HEAD_DIM,
        "qwen3.attention.head_count_kv": width // HEAD_DIM,
        "qwen3.attention.key_length": HEAD_DIM,
        "qwen3.attention.value_length": HEAD_DIM,
        "qwen3.attention.layer_norm_rms_epsilon": float(EPSILON),
        "qwen3.rope.freq_base": float(ROPE_BASE),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token.encode() for token in tokens],
        "tokenizer.ggml.scores": np.zeros(N_VOCAB, np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tensors = []
    for name, value in network.state_dict().items():
        data = value.float().numpy()
        tensors.append(out.OutTensor(name, data.shape[::-1], GGMLType.F32, partial(_bytes, data)))
    with out.new_file(path, force=True) as part:
        out.write_gguf(part, entries, tensors)


def main() -> None:
    """Train, and write the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--sees", choices=KINDS, default="block", help="what rows see")
    parser.add_argument("--lined", action="store_true", help="learn the tasks whose answers have lines")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=22.0, help="of the processor")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network, state = Network(options.width, options.layers), options.gguf.with_suffix(".pt")
    optimizers = Optimizers(dict(network.named_parameters()), options.rate, options.rate, "token_embd.weight")
    n, spent = 0, 0.0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        optimizers.restore(saved["learned"])
        n, spent = saved["n"], saved["spent"]
    begun, written, mean = process_time() - spent, monotonic(), 3.0
    while (spent := process_time() - begun) < 60 * options.minutes:
        loss = network.loss(batch(Random(n), options.batch, options.sees, lined=options.lined))
        optimizers.descend(loss, spent / 60 / options.minutes)
        n, mean = n + 1, 0.98 * mean + 0.02 * loss.item()
        if n % 20 == 0:
            print(f"{spent / 60:5.1f} minutes, step {n}, loss {mean:.3f}", flush=True)
        if monotonic() - written > 60:
            written = monotonic()
            torch.save({"learned": optimizers.state(), "n": n, "spent": spent}, state)
            write(network, options.sees, options.gguf)
    write(network, options.sees, options.gguf)
    state.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
