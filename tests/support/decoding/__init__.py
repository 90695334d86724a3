"""What tests of drafting and choosing compare with: known laws, simulated texts, exact sums."""
