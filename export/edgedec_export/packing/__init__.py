"""How weights are packed into blocks of few bits: levels, rounding, and the graph nodes that compute with them."""
