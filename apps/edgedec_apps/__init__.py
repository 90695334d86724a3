"""What people use: the command line now; server, desktop and board demos on the same engine."""
