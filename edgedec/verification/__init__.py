"""Opt-in verification rules: the same distribution, not the same text.

The default, `edgedec.verification.coupled.verify_coupled`, gives the same text for any draft, and asks nothing of the
drafter. These rules give each text with the target's probability, accept more, and are exact only for drafts drawn as
they assume:

| rule | the draft | if it is not |
|---|---|---|
| tokenwise | a chain | a tree goes to recursive |
| block | a chain, fresh random numbers every step | a tree goes to recursive |
| recursive | a tree, siblings that share a q drawn without replacement | |
| kseq | K independent paths side by side | |
| multipath | K independent paths side by side, fresh random numbers every step | a chain goes to block |

Fresh means that the noise a draft is drawn with was used by no earlier step's draft, not even for tokens that were
rejected: key it by the position of the step and the depth, not by the position of the token. All rules take nodes that
were looked up instead of drawn (q None) for what they are.
"""

from collections.abc import Mapping

from edgedec.verification.block import verify_block
from edgedec.verification.contract import Rule, TargetRow, Uniform
from edgedec.verification.kseq import verify_kseq
from edgedec.verification.multipath import verify_multipath
from edgedec.verification.recursive import verify_recursive
from edgedec.verification.tokenwise import verify_tokenwise
from edgedec.verification.uniform import uniform_source

RULES: Mapping[str, Rule] = {
    "tokenwise": verify_tokenwise,
    "block": verify_block,
    "recursive": verify_recursive,
    "kseq": verify_kseq,
    "multipath": verify_multipath,
}

__all__ = ["RULES", "Rule", "TargetRow", "Uniform", "uniform_source"]
