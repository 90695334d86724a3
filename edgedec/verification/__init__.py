"""Verification rules: which nodes of a draft stand, and which token follows them.

The default, `edgedec.verification.coupled.verify_coupled`, gives the same text for any draft, and asks nothing of the
drafter. The others are opt-in plug-ins of the group `edgedec.rules` (`edgedec.verification.rules`): they give each text
with the target's probability, and are exact only for drafts that were drawn as they assume, such as siblings without
replacement. Some assume fresh numbers: no earlier step's draft used the same random number, not even for a token that
was rejected. So a drafter keys its numbers by the position of the step and the depth of the node, not by the position
of the token. Under every rule a node may have been looked up instead of drawn; its q is then None.
"""
