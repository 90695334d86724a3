"""The public API: edgedec.load and its options, the engine, generations for an event loop, prompt cache files."""
