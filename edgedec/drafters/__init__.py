"""Drafters: they propose tokens, which the target verifies. One method a file.

Proposals come from text (`suffix`: the prompt, earlier outputs, a small corpus), from a smaller model (`draft_model`),
or from a trained head (`head`).

docs/architecture.md says where a new drafter goes; its contract is edgedec.drafter.Drafter, which `python -m
edgedec.testing NAME MODEL.gguf` checks. edgedec.drafters.draft_builder builds the draft: a tree (grow_tree) or a chain
with leaves (DraftBuilder.add_levels). What a drafter keeps between requests it declares in `shedding`, and what it
needs at load in `demands` (edgedec.drafter_traits). The policy (edgedec.scheduler) decides whether a draft pays, not
the drafter.
"""
