"""Export of targets and drafters. Nothing is exported yet; see docs/architecture.md."""
