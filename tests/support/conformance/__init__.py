"""Checks whether a runtime keeps the contract of edgedec.model (Model, Session); `__main__.py` runs them."""
