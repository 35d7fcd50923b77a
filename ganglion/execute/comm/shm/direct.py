"""Large collectives on tensors that live in shared memory: members read each other's directly.

    sync ("my data are final") | work on one another's memory | sync ("I am done with yours")

Two syncs whatever the size, and no copy in: each element is read once from every member.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ganglion.execute.comm.calls import Call
from ganglion.execute.comm.reduce_order import combine, combine_aliased, combine_by_tree
from ganglion.execute.comm.shm.progress import Job

_CHUNK_BYTES = 1 << 18  # what is written and read again at once should still be in the cache


def work_directly(job: Job, sources: Sequence[Tensor], index: int) -> None:
    """Do this member's share; `sources[i]` is the tensor of member i, in shared memory."""
    call, size = job.call, len(sources)
    if call.kind in ("all_reduce", "reduce"):
        width = -(-call.num_elements // size)
        _reduce(call, [source[index * width : (index + 1) * width] for source in sources], index)
    elif call.kind == "reduce_scatter":
        parts = [source.chunk(size)[index] for source in sources]
        for *pieces, out in _chunks([*parts, job.target]):
            combine(pieces, out, call.op)
    elif call.kind == "all_gather":
        for place, source in zip(job.target.chunk(size), sources, strict=True):
            place.copy_(source)
    elif index != call.root:
        job.target.copy_(sources[call.root])


def _reduce(call: Call, parts: Sequence[Tensor], index: int) -> None:
    """Combine `parts`, everybody's slice of this member, in place: everywhere, or at the root."""
    for pieces in _chunks(parts):
        if call.kind == "reduce":
            combine_by_tree(pieces, call.root, pieces[call.root], call.op)
            continue
        combine_aliased(pieces, index, call.op)
        for piece in pieces:
            if piece is not pieces[index]:
                piece.copy_(pieces[index])


def _chunks(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield stretches of all parts, which are equally long, that fit into a cache together."""
    step = _CHUNK_BYTES // parts[0].dtype.itemsize
    for low in range(0, parts[0].numel(), step):
        yield [part[low : low + step] for part in parts]
