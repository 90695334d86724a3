"""Runtimes: implementations of edgedec.model.Model. Each module is reached by entry point."""
