"""Applications of the engine: the command line, the server, benchmarks and evaluation."""
