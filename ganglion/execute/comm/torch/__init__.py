"""Messages and collectives over torch.distributed, between hosts and between GPUs."""

from ganglion.execute.comm.torch.group import WorldGroup, init_process_group, new_group
from ganglion.execute.comm.torch.transport import TorchTransport

__all__ = ["TorchTransport", "WorldGroup", "init_process_group", "new_group"]
