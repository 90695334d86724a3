"""Better answers from one model: choosing among several texts, within a text, and step by step with a scorer."""
