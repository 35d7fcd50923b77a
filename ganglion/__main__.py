"""`python -m ganglion`: the command line, for launchers that want a module."""

from ganglion.cli.main import main

main()
