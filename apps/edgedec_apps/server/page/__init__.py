"""The web chat: its page and scripts, and the files that are given to it."""
