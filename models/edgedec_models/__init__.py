"""Catalogue of models, and how they are fetched, verified and cached."""
