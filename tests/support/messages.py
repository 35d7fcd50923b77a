"""Messages for the tests of all transports: any dtype, shape and layout, made from one number."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from ganglion.execute.comm import Arrival, Transport, World

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
)
SHAPES = ((), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5), (1, 1, 1, 1, 1, 1), (33, 129), (70, 331))
DEADLINE_S = 30.0


def make_tensor(number: int) -> Tensor:
    """Return a tensor with contents, dtype, shape and memory layout that follow from `number`."""
    draw = random.Random(number)
    dtype, shape = draw.choice(DTYPES), draw.choice(SHAPES)
    generator = torch.Generator().manual_seed(number)
    if len(shape) >= 2 and draw.random() < 0.5:  # every second column of a transposed tensor
        wide = _random((*shape[:-2], shape[-1] * 2, shape[-2]), dtype, generator)
        tensor = wide[..., ::2, :].transpose(-1, -2)
    else:
        tensor = _random(shape, dtype, generator)
    return tensor.conj() if dtype.is_complex and draw.random() < 0.5 else tensor


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = torch.randint(-100, 100, shape, generator=generator)
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def contents(tensor: Tensor) -> bytes:
    """Return shape, dtype and every byte: equal contents are bitwise equal tensors."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + data


@dataclass(frozen=True)
class Letter:
    """One message of a traffic plan."""

    source: int
    target: int
    number: int


def traffic(seed: int, num_ranks: int, num_letters: int, *, to_self: bool = True) -> list[Letter]:
    """Return source, target and content of each letter; a source posts its own in this order."""
    draw = random.Random(seed)
    letters = []
    for number in range(num_letters):
        source, target = draw.randrange(num_ranks), draw.randrange(num_ranks)
        if to_self or source != target:
            letters.append(Letter(source, target, seed * 100_000 + number))
    return letters


def exchange_letters(transport: Transport, letters: list[Letter], seed: int) -> list[Arrival]:
    """Post and receive this rank's part, interleaved at random; return the arrivals, in order."""
    draw = random.Random(f"{seed} {transport.rank}")
    outgoing = [letter for letter in letters if letter.source == transport.rank]
    num_expected = sum(letter.target == transport.rank for letter in letters)
    arrivals: list[Arrival] = []
    for letter in outgoing:
        tensor = make_tensor(letter.number)
        transport.post(letter.target, "forward", tensor, step=seed, microbatch=letter.number)
        if tensor.is_contiguous() and tensor.numel():
            tensor.zero_()  # the sender's tensor is its own again
        while draw.random() < 0.5 and (arrival := transport.poll()) is not None:
            arrivals.append(arrival)
    while len(arrivals) < num_expected:
        arrivals.append(transport.receive(DEADLINE_S, "a letter"))
    transport.flush(DEADLINE_S)
    return arrivals


def exchange_checked(world: World, transport: Transport, seeds: list[int], num_letters: int) -> int:
    """Exchange letters once for each seed, check all that come, and return their number."""
    num_arrivals = 0
    for seed in seeds:
        letters = traffic(seed, world.num_ranks, num_letters)
        arrivals = exchange_letters(transport, letters, seed)
        check_letters(arrivals, letters, world.rank)
        num_arrivals += len(arrivals)
        world.barrier()  # letters of the next seed must not come early
    return num_arrivals


def check_letters(arrivals: list[Arrival], letters: list[Letter], rank: int) -> None:
    """Assert that all came, with the right contents, and in order for each source."""
    for source in {letter.source for letter in letters}:
        sent = [e.number for e in letters if (e.source, e.target) == (source, rank)]
        came = [a for a in arrivals if a.source == source]
        assert [arrival.header.microbatch for arrival in came] == sent
        for arrival in came:
            expected = make_tensor(arrival.header.microbatch)
            assert contents(arrival.tensor) == contents(expected)
            assert tuple(arrival.header.shape) == tuple(expected.shape)
            assert arrival.header.dtype == expected.dtype
