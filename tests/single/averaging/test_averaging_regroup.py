"""Workers come and go between exchanges: newcomers begin at the centre, losses leave it whole."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError, PeerLost
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.outer import diloco
from ganglion.execute.comm import World, run_threads
from ganglion.execute.comm.local.group import LocalHub
from tests.support.averages import (
    LR,
    Weights,
    assert_near,
    assert_same_bits,
    batch,
    copies,
    loss_of,
    make_model,
    plain_sgd,
    serial_easgd,
    train_steps,
)


class Meetings:
    """Worlds that the threads of a test can meet in, one after the other."""

    def __init__(self) -> None:
        self._hubs: dict[str, LocalHub] = {}
        self._lock = threading.Lock()

    def world(self, name: str, rank: int, num_ranks: int) -> World:
        with self._lock:
            hub = self._hubs.setdefault(name, LocalHub(Mesh(data=num_ranks), 10.0))
        return hub.world(rank)


def centre_of(average: ElasticAverage) -> Weights:
    with average.center_weights() as model:
        return copies(model)


@pytest.mark.parametrize("wishes", [
    {"beta": 0.9, "tau": 2}, {"beta": 0.9, "tau": 2, "center": "root"},
    {"beta": 0.9, "tau": 2, "compress": "int8"}, {"outer": diloco(), "tau": 2},
])  # fmt: skip
def test_a_newcomer_begins_at_the_centre_and_trains_on_with_the_others(wishes: Any) -> None:
    meetings = Meetings()

    def body(outside: World) -> Any:
        rank = outside.rank
        model = make_model(seed=rank)
        optimizer = plain_sgd(model.parameters())
        centre = None
        if rank < 2:
            average = ElasticAverage(model, optimizer, world=meetings.world("a", rank, 2), **wishes)
            with average:
                train_steps(model, optimizer, rank, range(4))
                kept, centre = copies(model), centre_of(average)
                average.regroup(meetings.world("b", rank, 3))
                assert_same_bits(copies(model), kept)
                train_steps(model, optimizer, rank, range(4, 8))
        else:
            average = ElasticAverage(model, optimizer, world=meetings.world("b", rank, 3), **wishes)
            centre = copies(model)
            with average:
                train_steps(model, optimizer, rank, range(4, 8))
        metrics = average.metrics()
        return centre, centre_of(average), metrics.num_workers, metrics.num_steps

    results = run_threads(Mesh(data=3), body)
    assert_same_bits(results[2][0], results[0][0])  # the newcomer stands where the centre was
    assert [r[2:] for r in results] == [(3, 8)] * 3
    if wishes.get("center") != "root":
        for result in results:
            assert_same_bits(result[1], results[0][1])


def test_a_newcomer_changes_alpha_for_all_at_the_same_exchange() -> None:
    """The simulation: two workers with beta / 2 for four steps, then three with beta / 3."""
    meetings, beta = Meetings(), 0.9

    def body(outside: World) -> Any:
        rank, model = outside.rank, make_model(seed=outside.rank)
        optimizer = plain_sgd(model.parameters())
        if rank < 2:
            average = ElasticAverage(
                model, optimizer, beta=beta, tau=1, world=meetings.world("a", rank, 2)
            )
            with average:
                train_steps(model, optimizer, rank, range(4))
            average.regroup(meetings.world("b", rank, 3))
        else:
            average = ElasticAverage(
                model, optimizer, beta=beta, tau=1, world=meetings.world("b", rank, 3)
            )
        with average:
            train_steps(model, optimizer, rank, range(4, 7))
        return copies(model), centre_of(average)

    found = run_threads(Mesh(data=3), body)
    workers, center = serial_easgd(2, 4, alpha=beta / 2)
    workers.append(dict(center))
    model = make_model()
    for step in range(4, 7):
        forces = [{n: beta / 3 * (w - center[n]) for n, w in worker.items()} for worker in workers]
        for rank, worker in enumerate(workers):
            model.load_state_dict(worker)
            x, y = batch(rank, step)
            loss = loss_of(model(x), y)
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            for (name, w), slope in zip(list(worker.items()), slopes, strict=True):
                worker[name] = w - LR * slope - forces[rank][name]
        center = {n: c + sum(f[n] for f in forces) for n, c in center.items()}
    for (weights, found_center), worker in zip(found, workers, strict=True):
        assert_near(weights, worker)
        assert_near(found_center, center)


@pytest.mark.parametrize(
    ("rate", "alphas"),
    [
        ({"beta": 0.9}, [0.3, 0.45, 0.9]),
        ({"beta": 1.0}, [1 / 3, 0.5, 0.5]),
        ({"alpha": 0.3}, [0.3, 0.3, 0.3]),
    ],
    ids=["beta", "no further than is stable", "alpha"],
)
def test_workers_that_leave_change_alpha_for_all_at_the_same_exchange(
    rate: Any, alphas: list[float]
) -> None:
    """The simulation: three workers for three steps, then two, then one; without gradients."""
    meetings, steps = Meetings(), 3

    def body(outside: World) -> Any:
        rank, model = outside.rank, make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        world = meetings.world("3", rank, 3)
        average = ElasticAverage(model, optimizer, tau=1, world=world, **rate)
        with torch.no_grad():
            model[0].bias.fill_(rank + 1.0)
        for number in (3, 2, 1):
            if number < 3:
                average.regroup(meetings.world(str(number), rank, number))
            with average:
                train_steps(model, optimizer, rank, range(steps))
            if rank == number - 1:
                break
        return float(model[0].bias.detach()[0]), float(centre_of(average)["0.bias"][0])

    found = run_threads(Mesh(data=3), body)
    center = float(make_model()[0].bias.detach()[0])
    weights = [1.0, 2.0, 3.0]
    for number, alpha in zip((3, 2, 1), alphas, strict=True):
        for _ in range(steps):
            forces = [alpha * (w - center) for w in weights[:number]]
            weights[:number] = [w - f for w, f in zip(weights[:number], forces, strict=True)]
            center += sum(forces)
        assert found[number - 1] == pytest.approx((weights[number - 1], center), abs=1e-12)


@pytest.mark.parametrize("wishes", [{"beta": 0.9}, {"beta": 0.9, "center": "root"},
                                    {"outer": diloco()}])  # fmt: skip
def test_survivors_go_on_after_a_loss(wishes: Any) -> None:
    meetings = Meetings()

    def body(outside: World) -> Any:
        rank = outside.rank
        model = make_model(seed=rank)
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(
            model, optimizer, tau=1, world=meetings.world("a", rank, 3), **wishes
        )
        with average:
            train_steps(model, optimizer, rank, range(3))
            if rank == 2:  # gone in silence, for good
                meetings._hubs["a"].fail(2, "killed")
                return None
            with pytest.raises(PeerLost):
                train_steps(model, optimizer, rank, range(3, 5))
            average.regroup(meetings.world("b", rank, 2))
            optimizer.zero_grad()
            losses = train_steps(model, optimizer, rank, range(5, 30))
        return losses, centre_of(average), average.metrics().num_workers

    first, second, _ = run_threads(Mesh(data=3), body)
    assert first[2] == second[2] == 2
    for losses, center, _ in (first, second):
        assert all(torch.isfinite(w).all() for w in center.values())
        assert sum(losses[-5:]) < sum(losses[:5])
    if "center" not in wishes:
        assert_same_bits(first[1], second[1])


def lose_the_answer(average: ElasticAverage, of: str) -> None:
    """Let this worker not learn how an exchange ended that it has given all to."""
    method: Any = average._method
    found = method._votes if of == "votes" else method._center
    part = found[0] if isinstance(found, list) else found

    def wait() -> None:
        raise PeerLost("rank 2 is gone")

    part.wait = wait


@pytest.mark.parametrize(
    ("wishes", "of"),
    [
        ({"beta": 0.9}, "votes"),
        ({"beta": 0.9, "compress": "int8"}, "votes"),
        ({"beta": 0.9, "center": "root"}, "votes"),
        ({"beta": 0.9, "center": "root"}, "center"),
        ({"outer": diloco(), "q": 0.5}, "votes"),
    ],
)
def test_who_did_not_hear_that_all_agreed_does_its_half_when_they_meet_again(
    wishes: Any, of: str
) -> None:
    """Rank 2 dies when rank 0 knows all votes, and rank 1 does not."""
    meetings, rank_0_knows = Meetings(), threading.Event()

    def start(name: str, rank: int) -> Any:
        model = make_model(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-300)  # no step of its own
        world = meetings.world(name, rank, 3)
        average = ElasticAverage(model, optimizer, tau=1, world=world, **wishes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank + 1.0)
        return model, optimizer, average

    def undisturbed(outside: World) -> Weights:
        model, optimizer, average = start("whole", outside.rank)
        with average:
            train_steps(model, optimizer, outside.rank, range(4))
        return copies(model)

    def body(outside: World) -> Any:
        rank = outside.rank
        model, optimizer, average = start("a", rank)
        with average:
            train_steps(model, optimizer, rank, range(3))
            if rank == 1:
                lose_the_answer(average, of)
            else:
                train_steps(model, optimizer, rank, range(3, 4))
            if rank == 0:
                rank_0_knows.set()
            if rank == 2:
                assert rank_0_knows.wait(10)
                meetings._hubs["a"].fail(2, "killed")
                return copies(model), {}, 4
            with pytest.raises(PeerLost):
                train_steps(model, optimizer, rank, range(4, 5))
            average.regroup(meetings.world("b", rank, 2))
            return copies(model), centre_of(average), average.metrics().num_exchanges

    found = run_threads(Mesh(data=3), body)
    assert [version for _, _, version in found] == [4, 4, 4]
    assert_same_bits(found[0][1], found[1][1])
    wanted = run_threads(Mesh(data=3), undisturbed)
    if of == "center":  # what it would have been drawn to never came
        wanted[1] = found[0][1]
    for (weights, _, _), whole in zip(found, wanted, strict=True):
        assert_near(weights, whole)


def test_a_broadcast_that_breaks_off_leaves_no_half_of_a_centre() -> None:
    """The root dies while it sends: what the others have may be the last centre there is."""
    meetings = Meetings()

    def body(outside: World) -> Any:
        rank, model = outside.rank, make_model(seed=outside.rank)
        optimizer = plain_sgd(model.parameters())
        world = meetings.world("a", rank, 2)
        average = ElasticAverage(model, optimizer, beta=0.9, tau=1, center="root", world=world)
        with average:
            train_steps(model, optimizer, rank, range(3))
            before = centre_of(average)
            method: Any = average._method
            if rank == 0:
                meetings._hubs["a"].fail(0, "killed")
                return before, before
            with pytest.raises(PeerLost):
                train_steps(model, optimizer, rank, range(3, 4))
            method._center._arriving[:3] = 99.0  # as much as came
            average.regroup(meetings.world("b", 0, 1))
            return before, centre_of(average)

    _, (before, after) = run_threads(Mesh(data=2), body)
    assert_same_bits(after, before)


@pytest.mark.parametrize("root_survives", [True, False])
def test_a_root_may_change_its_place_or_be_lost(root_survives: bool) -> None:
    """The newest centre goes on: the root's, or without it the one of the last exchange."""
    meetings, num_left = Meetings(), 3 if root_survives else 2

    def body(outside: World) -> Any:
        rank, model = outside.rank, make_model(seed=outside.rank)
        optimizer = plain_sgd(model.parameters())
        world = meetings.world("a", rank, 3)
        average = ElasticAverage(model, optimizer, beta=0.9, tau=1, center="root", world=world)
        with average:
            train_steps(model, optimizer, rank, range(3))
        before = centre_of(average)
        if rank == 0 and not root_survives:
            return before, None
        average.regroup(meetings.world("b", (rank + 2) % 3, num_left))
        with average:
            train_steps(model, optimizer, rank, range(3, 4))
            return before, centre_of(average)

    results = run_threads(Mesh(data=3), body)
    assert not torch.equal(results[0][0]["0.bias"], results[1][0]["0.bias"])  # one behind
    # After an exchange, all but the new root have the centre as it was before it.
    behind = results[2][1]
    assert_same_bits(behind, results[0 if root_survives else 1][0])


def test_a_new_worker_is_never_the_one_to_ask() -> None:
    """Rank 0 of the second world is new: its random weights must not become the centre."""
    meetings = Meetings()

    def body(outside: World) -> Any:
        model = make_model(seed=50 + outside.rank)
        optimizer = plain_sgd(model.parameters())
        if outside.rank == 0:
            average = ElasticAverage(model, optimizer, beta=0.9, world=meetings.world("b", 0, 2))
            return copies(model), centre_of(average)
        average = ElasticAverage(model, optimizer, beta=0.9, world=meetings.world("a", 0, 1))
        with average:
            train_steps(model, optimizer, 0, range(3))
        before = centre_of(average)
        average.regroup(meetings.world("b", 1, 2))
        return before, centre_of(average)

    (new, new_center), (old, old_center) = run_threads(Mesh(data=2), body)
    assert_same_bits(new, old)
    assert_same_bits(new_center, old)
    assert_same_bits(old_center, old)


def test_models_that_differ_are_refused() -> None:
    def body(world: World) -> None:
        model = torch.nn.Linear(3, 2 + world.rank)
        ElasticAverage(model, plain_sgd(model.parameters()), beta=0.9, world=world)

    with pytest.raises(ConfigError, match=r"packs (192|128) elements of 2 tensors"):
        run_threads(Mesh(data=2), body)


def test_methods_that_cannot_change_their_workers_say_so() -> None:
    def body(world: World) -> None:
        model = make_model()
        average = ElasticAverage(model, plain_sgd(model.parameters()), mode="sync_sgd", world=world)
        with pytest.raises(ConfigError, match="SyncSgd cannot change its workers"):
            average.regroup(world)

    run_threads(Mesh(data=1), body)
