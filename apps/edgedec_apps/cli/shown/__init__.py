"""What a person sees while a command runs: text as it comes, progress, the log, and what was drafted."""
