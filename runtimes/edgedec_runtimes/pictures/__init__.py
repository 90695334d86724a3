"""Pictures: from a picture's file to the rows that stand for it in a prompt, and from messages to such a prompt."""
