"""Messages and collectives between local processes: ours against Gloo and MPICH."""
