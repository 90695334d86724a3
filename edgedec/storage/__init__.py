"""What outlives a process: small answers in the cache, and locks on files that processes share."""
