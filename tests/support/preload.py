"""The imports of the tests' fork server, made once for all the processes that it forks."""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings

import numpy.testing  # noqa: F401  torch.testing imports it
import pytest  # noqa: F401
import torch._dynamo  # the first step of an optimizer imports it
import torch.distributed.launcher.api
import torch.testing
import torch.utils.tensorboard

import ganglion

# Starting MPI is the business of a process under mpiexec.
_LEFT_OUT = ("ganglion.__main__", "ganglion.execute.comm.mpi", "ganglion.execute.averaging.mpi")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _module in pkgutil.walk_packages(ganglion.__path__, "ganglion."):
        if not _module.name.startswith(_LEFT_OUT):
            importlib.import_module(_module.name)

torch.set_num_threads(1)
# The test that starts the server may keep to one core.
os.sched_setaffinity(0, range(os.cpu_count() or 1))
