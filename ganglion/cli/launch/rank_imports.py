"""The imports of every rank, made once by the fork server.

Collecting garbage during so many imports takes a fifth of their time and finds nothing. Later
collections do not touch frozen objects, so ranks go on sharing their memory.
"""

from __future__ import annotations

import gc

gc.disable()

import torch._dynamo  # noqa: E402, F401  torch imports it when the first optimizer is made

import ganglion.cli.main  # noqa: E402
import ganglion.execute.train  # noqa: E402, F401

gc.freeze()
gc.enable()
