"""dKV-Cache: keys and values of a token are kept from the pass after the one that committed it; masks have none.

So a pass evaluates the masked positions, and the tokens that the pass before has committed. Every given number of
passes, and at the beginning of a block, everything is evaluated.

Paper: dKV-Cache, github.com/horseee/dKV-Cache
Option: `--method diffusion:threshold,delayed:4`
For: diffusion language models whose rows see the whole text
Measured: with `threshold,delayed:2` 27 rows a forward and 74 of 176 made tasks right, where `threshold` has 32 and 97
    (`python benchmarks/diffusion/compare_rules.py whole.gguf --tasks 16 --length 8 --context 32`)
Status: study
"""

from edgedec_methods.diffusion.rules import Canvas, LayoutKind


def delayed(canvas: Canvas, every: float) -> tuple[list[int], list[int]]:
    """Evaluate all positions in one of `every` passes, and only the open ones in the others; see LayoutKind."""
    n = len(canvas.ids)
    open_ones = {*canvas.masked, *range(canvas.end, n)} | canvas.observed
    closed = [place for place in canvas.held if place not in open_ones] if canvas.n_passes % int(every) else []
    settled = [place for place in range(n) if place not in {*closed} | open_ones]
    return closed, settled + sorted(open_ones)


DELAYED = LayoutKind(delayed, default=4.0, least=1.0, most=1e6)
