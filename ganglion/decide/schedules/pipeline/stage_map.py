"""The stage map: which stages a rank of the pipeline holds, and who holds a stage.

Stages are numbered along the model. A rank holds one stage, or several chunks of the model, dealt
round (interleaved) or folded back (V):

    3 ranks, 2 chunks      looped  rank 0: 0 3    V  rank 0: 0 5
                                   rank 1: 1 4       rank 1: 1 4
                                   rank 2: 2 5       rank 2: 2 3
"""

from __future__ import annotations

from dataclasses import dataclass

from ganglion.errors import LayoutError


@dataclass(frozen=True, slots=True)
class StageMap:
    """`num_ranks` ranks with `num_chunks` stages each; `folded` turns round at the last rank."""

    num_ranks: int
    num_chunks: int = 1
    folded: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_chunks < 1:
            raise LayoutError(
                f"{self.num_ranks} ranks with {self.num_chunks} stages each are no pipeline; use "
                f"1 or more of both"
            )

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        chunk, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.folded and chunk % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in the order of the model."""
        if not 0 <= rank < self.num_ranks:
            raise LayoutError(
                f"stage {rank} of {self.num_ranks} stages does not exist; use 0 or more"
            )
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)
