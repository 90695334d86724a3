"""Names of models, and how their files are fetched, verified and cached."""
