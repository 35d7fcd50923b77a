"""Messages and collectives through torch.distributed."""

from ganglion.execute.comm.torch.group import WorldGroup, new_group
from ganglion.execute.comm.torch.transport import TorchTransport

__all__ = ["TorchTransport", "WorldGroup", "new_group"]
