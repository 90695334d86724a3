"""Settings compared by what they cost and how good their answers are."""
