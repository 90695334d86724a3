"""What outlives a process: answers kept in the cache, locks on shared files, and files written whole or not at all."""
