"""Early exits: what is trained behind the target's first layers."""
