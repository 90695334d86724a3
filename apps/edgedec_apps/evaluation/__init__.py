"""Evaluation of models: what a setting costs in quality and brings in speed, and the search for half-layers to skip."""
