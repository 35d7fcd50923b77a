"""The half that executes: torch moves bytes and runs autograd, and decides nothing."""
