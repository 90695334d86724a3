"""What precedes a load: finding the file, choosing the runtime, deciding on a draft model or a small model."""
