"""Tokens before masks (after WeDLM): rows see what lies before them, so a pass has the masks last, at their places.

A model with causal attention denoises so: each mask sees all tokens of its block and before it. Tokens in front of the
first mask keep their keys and values for good, as in plain decoding. WeDLM's window slides by tokens; here it is the
block.

Paper: after WeDLM, Liu et al. 2025, arXiv:2512.22737
Option: a model's file decides (`diffusion.window_size`)
For: diffusion language models with causal attention
Measured: 1.84 tokens a forward, 97 of 176 made tasks right, where block diffusion of the same size has 1.50 and 84
    (`python benchmarks/diffusion/compare_rules.py front.gguf --tasks 16 --context 32`)
Status: opt-in
"""

from edgedec_methods.diffusion.rules import Canvas


def in_front(canvas: Canvas) -> tuple[list[int], list[int]]:
    """Return the tokens in front of the first mask, and the other tokens with the masks behind them; see Layout."""
    first = min(canvas.masked[0], min(canvas.observed))
    return [*range(first)], [p for p in range(first, canvas.end) if p not in {*canvas.masked}] + [*canvas.masked]
