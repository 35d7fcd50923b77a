"""The command line: one file for each command, and `launch` for the ranks that commands start.

A command imports torch only when it needs it. Nothing else in the package imports this room.
"""
