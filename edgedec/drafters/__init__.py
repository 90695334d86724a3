"""Drafters: they propose tokens, which the target verifies. One method a file.

Proposals come from text (`suffix`: the prompt, earlier outputs, a small corpus), from a smaller model (`draft_model`),
or from a trained head (`head`).

A new drafter is a file in one of these folders or, where `auto` does not use it, in methods/edgedec_methods, with a
class that keeps the contract edgedec.drafter.Drafter: begin, propose, learn, memory_bytes, and what it needs of the
target. edgedec.drafters.draft_builder builds the draft: a tree (grow_tree) or a chain with leaves
(DraftBuilder.add_levels). The drafter gets its name, for `--draft NAME`, by a line under
`[project.entry-points."edgedec.drafters"]` in pyproject.toml, as one of another package does (examples/drafter-plugin).
`AUTO` in edgedec.scheduler.drafter_factories decides whether `--draft auto` uses the drafter. What a drafter keeps
between requests it declares in `shedding`, and what it needs at load in `demands` (edgedec.drafter_traits). The drafter
gets a row in docs/methods.md and a line in the list of tests/decoding/test_same_text.py; the command `python -m
edgedec.testing NAME MODEL.gguf` checks the contract. The policy (edgedec.scheduler) decides whether a
draft pays, not the drafter.
"""
