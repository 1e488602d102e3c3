"""What a command shows while it works: progress bars and training progress."""
