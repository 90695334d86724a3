"""Train a small block-diffusion model on made tasks, on one core, and write it as a GGUF that edgedec runs.

    python benchmarks/diffusion/train_small.py small.gguf --minutes 60

The network is a Qwen3 of 5 million parameters, whose rows see their block of 16 positions and the block before. A row
is trained to predict its own token where that is masked, as in block diffusion (Arriola et al. 2025, arXiv:2503.09573):
each sequence of two blocks stands there with a random part of its answer masked, and its first block once more, clean;
a noisy row sees its own noisy block and the clean one before. Losses on the answer only. The words of a prompt are
tokens of their own, all else is bytes. A checkpoint beside the result is written every minute, so a run that was
stopped goes on.
"""

import argparse
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic, process_time

import numpy as np
import torch
from numpy.typing import NDArray
from small_tasks import TASKS
from torch import Tensor, nn
from torch.nn import functional

from edgedec.gguf.tensor_types import GGMLType
from edgedec_export import gguf_writer as out
from edgedec_export.training.optimizing import Optimizers

BLOCK, LENGTH = 16, 32
EOS, SPACE, BYTES, MASK = 2, 3, 4, 260
WORDS = {word: MASK + 1 + i for i, word in enumerate((*(f"{kind}:" for kind in TASKS), "="))}
N_VOCAB, WIDTH, N_LAYER, N_HEAD, HEAD_DIM, N_FF = 288, 256, 6, 8, 32, 768
ROPE_BASE, EPSILON = 10_000.0, 1e-6


def token_ids(text: str) -> list[int]:
    """Return the ids of a text: words of prompts, and bytes."""
    ids: list[int] = []
    for part in re.split("(" + "|".join(WORDS) + ")", text):
        ids += [WORDS[part]] if part in WORDS else [SPACE if byte == 32 else BYTES + byte for byte in part.encode()]
    return ids


def batch(rng: Random, n: int) -> tuple[Tensor, Tensor]:
    """Return int[n, LENGTH] of sequences, and the same with masks."""
    clean, noisy = [], []
    for _ in range(n):
        prompt, answer = TASKS[rng.choice(tuple(TASKS))](rng)
        begun = token_ids(prompt)
        row = [*begun, *token_ids(answer)]
        end = min((len(row) // BLOCK + 1) * BLOCK, LENGTH)
        row += [EOS] * (LENGTH - len(row))
        masked = list(row)
        for start in range(0, end, BLOCK):
            places = [i for i in range(start, start + BLOCK) if i >= len(begun)]
            share = rng.random()
            for i in [i for i in places if rng.random() < share] or rng.sample(places, min(1, len(places))):
                masked[i] = MASK
        clean.append(row)
        noisy.append(masked)
    return torch.tensor(clean), torch.tensor(noisy)


def visible() -> Tensor:
    """Return bool[BLOCK + LENGTH, BLOCK + LENGTH]: which rows each row sees, of a clean block and two noisy ones."""
    part = torch.arange(BLOCK + LENGTH) // BLOCK
    return (part[:, None] == part[None, :]) | ((part[:, None] == 2) & (part[None, :] == 0))


class Layer(nn.Module):  # type: ignore[misc]  # torch may be missing
    """A layer of a Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        n = N_HEAD * HEAD_DIM
        self.attn_norm, self.ffn_norm = nn.RMSNorm(WIDTH, EPSILON), nn.RMSNorm(WIDTH, EPSILON)
        self.attn_q_norm, self.attn_k_norm = nn.RMSNorm(HEAD_DIM, EPSILON), nn.RMSNorm(HEAD_DIM, EPSILON)
        self.attn_q, self.attn_k, self.attn_v = (nn.Linear(WIDTH, n, bias=False) for _ in range(3))
        self.attn_output = nn.Linear(n, WIDTH, bias=False)
        self.ffn_gate, self.ffn_up = (nn.Linear(WIDTH, N_FF, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(N_FF, WIDTH, bias=False)

    def forward(self, x: Tensor, sees: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Return what leaves the layer."""
        y = self.attn_norm(x)
        q, k, v = (
            m(y).unflatten(-1, (N_HEAD, HEAD_DIM)).transpose(1, 2) for m in (self.attn_q, self.attn_k, self.attn_v)
        )
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
    """The network: int[n, BLOCK + LENGTH] -> logits of the noisy rows."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(N_VOCAB, WIDTH)
        self.blk = nn.ModuleList(Layer() for _ in range(N_LAYER))
        self.output_norm = nn.RMSNorm(WIDTH, EPSILON)
        self.output = nn.Linear(WIDTH, N_VOCAB, bias=False)
        nn.init.normal_(self.token_embd.weight, std=0.5)
        places = torch.cat([torch.arange(BLOCK), torch.arange(LENGTH)])
        angles = places[:, None] / ROPE_BASE ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.cat([angles, angles], -1)
        self.turns = angles.cos(), angles.sin()
        self.sees = visible()

    def forward(self, ids: Tensor) -> Tensor:
        """Return f32[n, LENGTH, N_VOCAB]."""
        x = self.token_embd(ids)
        for layer in self.blk:
            x = layer(x, self.sees, self.turns)
        return self.output(self.output_norm(x[:, BLOCK:]))


def _bytes(data: NDArray[np.float32]) -> Iterator[bytes]:
    yield data.tobytes()


def write(network: Network, path: Path) -> None:
    """Write the network as a GGUF."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256)), "<mask>"]
    tokens += [*WORDS]
    kinds = [2, 3, 3, 1, *[6] * 256, 3, *[4] * len(WORDS), *[5] * (N_VOCAB - len(tokens))]
    tokens += [f"[unused{i}]" for i in range(N_VOCAB - len(tokens))]
    entries = [
        ("general.architecture", out.text("qwen3")),
        ("general.name", out.text("small block diffusion, made tasks")),
        ("diffusion.block_size", out.whole_number(BLOCK)),
        ("diffusion.shift_logits", out.boolean(False)),
        ("tokenizer.ggml.mask_token_id", out.whole_number(MASK)),
        *(
            (f"qwen3.{key}", out.whole_number(value))
            for key, value in {
                "context_length": 1024,
                "embedding_length": WIDTH,
                "block_count": N_LAYER,
                "feed_forward_length": N_FF,
                "attention.head_count": N_HEAD,
                "attention.head_count_kv": N_HEAD,
                "attention.key_length": HEAD_DIM,
                "attention.value_length": HEAD_DIM,
            }.items()
        ),
        ("qwen3.attention.layer_norm_rms_epsilon", out.real_number(EPSILON)),
        ("qwen3.rope.freq_base", out.real_number(ROPE_BASE)),
        ("tokenizer.ggml.model", out.text("llama")),
        ("tokenizer.ggml.tokens", out.texts([token.encode() for token in tokens])),
        ("tokenizer.ggml.scores", out.float32s(np.zeros(N_VOCAB, np.float32))),
        ("tokenizer.ggml.token_type", out.int32s(kinds)),
        ("tokenizer.ggml.unknown_token_id", out.whole_number(0)),
        ("tokenizer.ggml.eos_token_id", out.whole_number(EOS)),
        ("tokenizer.ggml.add_bos_token", out.boolean(False)),
        ("tokenizer.ggml.add_space_prefix", out.boolean(False)),
    ]
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
    parser.add_argument("--minutes", type=float, default=60.0, help="of the processor")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network, state = Network(), options.gguf.with_suffix(".pt")
    optimizers = Optimizers(dict(network.named_parameters()), options.rate, options.rate, "token_embd.weight")
    n, spent = 0, 0.0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        optimizers.restore(saved["learned"])
        n, spent = saved["n"], saved["spent"]
    begun, written, mean = process_time() - spent, monotonic(), 3.0
    while (spent := process_time() - begun) < 60 * options.minutes:
        clean, noisy = batch(Random(n), options.batch)
        logits = network(torch.cat([clean[:, :BLOCK], noisy], 1))
        places = noisy == MASK
        loss = functional.cross_entropy(logits[places], clean[places])
        optimizers.descend(loss, spent / 60 / options.minutes)
        n, mean = n + 1, 0.98 * mean + 0.02 * loss.item()
        if n % 20 == 0:
            print(f"{spent / 60:5.1f} minutes, step {n}, loss {mean:.3f}", flush=True)
        if monotonic() - written > 60:
            written = monotonic()
            torch.save({"learned": optimizers.state(), "n": n, "spent": spent}, state)
            write(network, options.gguf)
    write(network, options.gguf)
    state.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
