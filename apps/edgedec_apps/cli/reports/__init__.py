"""What commands tell of a model, on this machine or not: its memory, its header, its draft head, what to expect."""
