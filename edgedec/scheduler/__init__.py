"""The scheduler: which drafters propose, what each node of a draft is worth, and how many of them are verified."""
