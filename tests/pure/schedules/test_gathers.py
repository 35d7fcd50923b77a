"""What is gathered early is what is used next, on all ranks alike and never in vain twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.schedules.buckets.gathers import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    GatherOrder,
    Use,
    kept_within,
)

uses = st.lists(
    st.builds(Use, st.sampled_from([FORWARD, RECOMPUTE, BACKWARD]), st.integers(0, 4)), max_size=30
)


def begun(order: GatherOrder, sequence: Iterable[Use]) -> list[int | None]:
    return [order.on_use(use) for use in sequence]


def pass_through(num_layers: int, *, recompute: bool = False, tied: bool = False) -> list[Use]:
    """The uses of one microbatch; with `tied`, the last layer multiplies with the first weight."""
    layers = [*range(num_layers), *([0] if tied else [])]
    forward = [Use(FORWARD, layer) for layer in layers]
    backward = []
    for layer in reversed(layers):
        backward += [Use(RECOMPUTE, layer)] if recompute else []
        backward.append(Use(BACKWARD, layer))
    return forward + backward


def wanted(sequence: Sequence[Use]) -> list[int | None]:
    """What to begin at each use, if all is known; nothing if the same weight comes next."""
    following = [use.weight for use in sequence[1:]]
    pairs = zip(sequence, following, strict=False)
    return [None if use.weight == after else after for use, after in pairs] + [None]


def test_the_first_pass_teaches_and_the_second_begins_early() -> None:
    order, sequence = GatherOrder(), pass_through(4)
    assert begun(order, sequence) == [None] * len(sequence)
    order.on_change()
    assert begun(order, sequence) == [1, 2, 3, None, 2, 1, 0, None]


def test_recomputation_has_places_of_its_own() -> None:
    order, sequence = GatherOrder(), pass_through(3, recompute=True)
    begun(order, sequence)
    order.on_change()
    assert begun(order, sequence) == [1, 2, None, None, 1, None, 0, None, None]


def test_a_shared_weight_is_followed_by_what_belongs_there() -> None:
    order, sequence = GatherOrder(), pass_through(3, tied=True)
    begun(order, sequence)
    order.on_change()
    assert begun(order, sequence) == wanted(sequence)


def test_nothing_is_begun_before_weights_change() -> None:
    order, sequence = GatherOrder(), pass_through(2)
    for _ in range(3):
        begun(order, sequence)
        order.on_change()
    assert begun(order, sequence)[-1] is None


def test_between_microbatches_the_next_one_is_begun() -> None:
    # The lookup of a table needs no gather in backward.
    order, sequence = GatherOrder(), pass_through(3)[:-1]
    assert sequence[-1] == Use(BACKWARD, 1)
    for _ in range(2):
        begun(order, sequence)
    assert begun(order, sequence) == [1, 2, None, 1, 0]


def test_the_end_of_a_step_is_known_by_its_length() -> None:
    order, sequence = GatherOrder(), pass_through(3)[:-1]
    for _ in range(3):
        begun(order, [*sequence, *sequence])
        order.on_change()
        order.on_change()  # nobody used anything in between: no step
    assert begun(order, sequence)[-1] == 0
    assert begun(order, sequence)[-1] is None


def test_an_evaluation_in_between_is_learned_too() -> None:
    order, training = GatherOrder(), pass_through(3)
    forward = [use for use in training if use.phase == FORWARD]
    begun(order, training)
    order.on_change()
    assert begun(order, forward)[:2] == [1, 2]
    begun(order, forward)
    assert begun(order, forward) == [1, 2, 0]
    order.on_change()
    assert begun(order, training)[:2] == [1, 2]


@given(uses, uses)
def test_ranks_that_see_the_same_begin_the_same(first: list[Use], second: list[Use]) -> None:
    one, other = GatherOrder(), GatherOrder()
    for sequence in (first, second):
        assert begun(one, sequence) == begun(other, sequence)
        one.on_change()
        other.on_change()


@given(uses)
def test_only_other_known_weights_are_begun(sequence: list[Use]) -> None:
    order, seen = GatherOrder(), set[int]()
    for use in [*sequence, *sequence]:
        seen.add(use.weight)
        following = order.on_use(use)
        assert following is None or (following in seen and following != use.weight)


@given(st.lists(st.builds(Use, st.just(FORWARD), st.integers(0, 20)), unique=True, max_size=20))
def test_an_order_without_repetition_is_known_after_one_pass(sequence: list[Use]) -> None:
    order = GatherOrder()
    begun(order, sequence)
    order.on_change()
    if sequence:
        assert begun(order, sequence) == wanted(sequence)


# --- what is kept --------------------------------------------------------------------------------


def test_weights_are_kept_from_the_first_on_as_long_as_they_fit() -> None:
    assert kept_within([4, 3, 9, 2, 2], 10) == [True, True, False, True, False]
    assert kept_within([4, 3], 0) == [False, False]
    assert kept_within([4, 3], 7) == [True, True]
    assert kept_within([], 7) == []


@given(st.lists(st.integers(1, 50)), st.integers(0, 200))
def test_a_budget_is_kept_and_used(sizes: list[int], budget: int) -> None:
    kept = kept_within(sizes, budget)
    spent = 0
    for size, is_kept in zip(sizes, kept, strict=True):
        assert is_kept == (spent + size <= budget)
        spent += size * is_kept
    assert spent <= budget
