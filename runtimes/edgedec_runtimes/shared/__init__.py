"""What several runtimes share: the models' and sessions' common part, checks of a forward, measured facts."""
