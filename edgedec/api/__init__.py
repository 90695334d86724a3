"""The public API: loading a model, the engine, its async counterparts, prompt caches."""
