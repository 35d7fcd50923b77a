"""Memory: predictions against measured peaks, and state that waits on the disk."""
