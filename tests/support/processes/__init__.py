"""Processes that tests start, or live in: the command line, servers, a browser, other machines."""
