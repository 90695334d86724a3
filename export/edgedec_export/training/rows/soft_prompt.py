"""Tunes a soft prompt for a crushed model: vectors that stand before every text, and make its texts more probable.

What is learned is either the next token of each text, or the probabilities that the whole model gives to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.gguf_writer import OutTensor, write_gguf
from edgedec_export.training.arithmetic import product_type
from edgedec_export.training.network import Tensor
from edgedec_export.training.rows.llama import TorchLlama
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.weights.soft_vectors import KIND, TARGET, TENSOR, tuned_model

ROWS, NORM = "token_embd.weight", "output_norm.weight"
_RATE = 0.1  # of Adam, in standard deviations of an embedding's element
_BATCH = 2  # texts of a step


def whole_llama(parts: TargetParts) -> TorchLlama:
    """Return a model whose embedding is its output matrix, with both ends; raises as TorchLlama.of."""
    llama = TorchLlama.of(parts)
    rows = torch.from_numpy(parts.output_rows(np.arange(parts.network.n_vocab))).to(product_type("cpu"))
    ends: Mapping[str, Tensor] = {ROWS: rows, NORM: torch.from_numpy(parts.output_norm)}
    return replace(llama, tensors={**llama.tensors, **ends})


def logits_behind(llama: TorchLlama, prefix: Tensor, text: Tensor) -> Tensor:
    """Return float32[n - 1, n_vocab], the logits behind vectors that predict all n tokens of a text but the first."""
    rows = llama.tensors[ROWS]
    x = torch.cat([prefix, F.embedding(text, rows).float()])
    out, _ = llama.evaluate(x, torch.arange(len(x)), torch.ones(len(x), len(x), dtype=torch.bool).tril(), [])
    return F.linear(llama.norm(out[len(prefix) : -1], llama.tensors[NORM]).to(rows.dtype), rows).float()


def tuned(llama: TorchLlama, first: Tensor, texts: Sequence[Tensor], teacher: TorchLlama | None, n: int) -> Tensor:
    """Return a soft prompt after n texts, which are taken in turn.

    Args:
        llama: The crushed model.
        first: float32[n_vectors, n_embd], the vectors that tuning begins with.
        texts: Tokens, int64 each.
        teacher: The model whose probabilities are learned; None to learn the texts' own tokens.
        n: How many texts.
    """
    delta, scale = torch.zeros_like(first, requires_grad=True), llama.tensors[ROWS].float().std()
    optimizer = torch.optim.Adam([delta])
    for step in range(0, n, _BATCH):
        optimizer.param_groups[0]["lr"] = _RATE * (1 - step / n)
        for text in (texts[(step + i) % len(texts)] for i in range(_BATCH)):
            with torch.no_grad():
                goal = text[1:] if teacher is None else logits_behind(teacher, first[:0], text).softmax(-1)
            (F.cross_entropy(logits_behind(llama, first + scale * delta, text), goal) / _BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (first + scale * delta).detach()


def write_prompt(out: Path, vectors: Tensor, network: Network, variant: str) -> None:
    """Write vectors as `--method soft-prompt` reads them; `variant` is ModelCard.variant of the tuned model."""
    n, data = network, vectors.numpy().astype("<f4").tobytes()
    target = tuned_model(n.architecture, n.n_layer, n.n_embd, n.n_vocab, variant)
    tensor = OutTensor(TENSOR, (n.n_embd, len(vectors)), GGMLType.F32, lambda: iter([data]))
    write_gguf(out, {"general.type": KIND, TARGET: target}, [tensor])
