"""`ganglion plan` and `ganglion why`: choose a layout, and explain one."""

from ganglion.cli.planning.declared import plan, why

__all__ = ["plan", "why"]
