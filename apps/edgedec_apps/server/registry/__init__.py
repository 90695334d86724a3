"""The models of a server: what their names stand for, what they may hold, and who waits for them."""
