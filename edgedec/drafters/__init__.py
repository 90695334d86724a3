"""Drafters: they propose tokens, which the target verifies. One method a file.

Four rooms, by where the proposals come from: `suffix` copies them from text (the prompt, earlier outputs, a small
corpus), `ngram` looks them up in tables of the target's own probabilities, `draft_model` evaluates a smaller model, and
`self_speculation` evaluates a part of the target's layers. Drafters with trained heads will be a room `head`.

A new drafter is a file in one of these rooms, with a class that keeps the contract edgedec.draft.Drafter: begin, draft,
accept, memory_bytes, and what it needs of the target. edgedec.drafters.draft_builder builds the draft: a tree
(grow_tree) or a chain with leaves (DraftBuilder.add_levels). The drafter gets its name, for `--draft NAME`, by a line
under `[project.entry-points."edgedec.drafters"]` in pyproject.toml, and by the same line in edgedec.plugins for
applications without package metadata; a plug-in needs the line in its own pyproject.toml only
(examples/drafter-plugin). `python -m edgedec.conformance drafter NAME MODEL.gguf` checks the contract. What a draft
costs and whether it pays is not the drafter's to decide, but the policy's (edgedec.scheduler).
"""
