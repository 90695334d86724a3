"""Kept surroundings (after Window-Diffusion): a pass evaluates the open block; the text around it is kept.

The first pass of a block, and every 32nd, evaluates the text, the block and the given number of masked positions behind
it; what is behind these is left out. The passes between them see the keys and values of that pass. With every position
behind the block it is the dual cache of Fast-dLLM. In Window-Diffusion the positions to be denoised slide; here they
are the block's.

Paper: after github.com/vhicrgit/Window-Diffusion; Wu et al. 2025 (Fast-dLLM), arXiv:2505.22618
Option: `--method diffusion:threshold,window:64`
For: diffusion language models whose rows see the whole text
Measured: with `threshold,window:4` 13 rows a forward and 44 of 176 made tasks right, where `threshold` has 32 and 97; a
    forward of 32 rows takes 0.11 of one of 256 on smollm2-135m
    (`python benchmarks/diffusion/compare_rules.py whole.gguf --tasks 16 --length 8 --context 32`)
Status: study
"""

from edgedec_methods.diffusion.rules import Canvas, LayoutKind

_CYCLE = 32


def window(canvas: Canvas, n_behind: float) -> tuple[list[int], list[int]]:
    """Evaluate a block with the `n_behind` masked positions behind it; see LayoutKind."""
    seen = range(min(len(canvas.ids), canvas.end + int(n_behind)))
    inside = {*range(canvas.start, canvas.end)} | canvas.observed
    around = [place for place in seen if place not in inside]
    outside = [place for place in canvas.held if place not in inside] if canvas.n_passes % _CYCLE else []
    return outside, [place for place in around if place not in {*outside}] + sorted(inside)


WINDOW = LayoutKind(window, default=64.0, least=0.0, most=1e6)
