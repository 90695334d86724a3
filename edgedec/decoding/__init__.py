"""One generation: its steps, its text, and its turn on a session."""
