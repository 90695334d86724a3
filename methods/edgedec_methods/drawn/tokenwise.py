"""Token-wise rejection: each token of a drawn chain is accepted with min(1, p / q), or drawn anew from the rest of p.

It is recursive rejection (edgedec_methods.drawn.recursive) with drafts that are chains.

Paper: Leviathan et al. 2023, arXiv:2211.17192
Option: `--draft-option rule=tokenwise`
For: comparing rules that keep the distribution, not the text
Measured: 45.0 tokens/s with a head at temperature 1, where `coupled` has 54.2 (`studies/drawn_trees`, program at
    67b59fb8)
Status: study
"""

from edgedec_methods.drawn.recursive import verify_recursive
from edgedec_methods.drawn.rules import Rule

RULE = Rule(verify_recursive)
