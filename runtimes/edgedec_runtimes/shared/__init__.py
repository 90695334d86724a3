"""What several runtimes use: the sessions' bookkeeping, who may use a model, the proof that rows are exact."""
