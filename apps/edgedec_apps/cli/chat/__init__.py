"""A chat at the terminal: its conversation, the lines that a person types, and the commands that begin with a slash."""
