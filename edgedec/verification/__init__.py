"""Verification rules: which nodes of a draft stand, and which token follows them.

The core's only rule, `edgedec.verification.coupled.verify_coupled`, gives the same text for any draft, and asks nothing
of the drafter. Guests bring others by the plug-in group `edgedec.rules` (`edgedec.verification.rules`): these give each
text with the target's probability, and say how drafts are drawn (edgedec.draft.Drawing), as they are exact for such
drafts only. Under every rule a node may have been looked up instead of drawn; its q is then None.
"""
