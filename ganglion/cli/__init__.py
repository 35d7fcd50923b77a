"""The command line: one file per command; each imports torch only when it needs it."""
