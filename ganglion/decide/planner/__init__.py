"""The planner: which layout of a model on a cluster, how long, how much memory, and why.

Everything here follows from numbers. A closed form ranks all layouts; the simulator, which drives
the engine's own schedules, confirms the best. Printing belongs to cli.
"""

from ganglion.decide.planner.answer import Answer, PlannedLayout, StepParts
from ganglion.decide.planner.ask import (
    answer_of,
    best_plan,
    plan,
    question_of,
    quick_answer,
    read_run,
)
from ganglion.decide.planner.explain import (
    WhatIf,
    explain,
    limit,
    memory_sentence,
    remedies,
    what_ifs,
)
from ganglion.decide.planner.from_run import MeasuredRun, read_measured, refined_as_a_whole
from ganglion.decide.planner.methods import METHODS
from ganglion.decide.planner.question import Question, parse_fixed
from ganglion.decide.planner.search import priced

__all__ = [
    "METHODS",
    "Answer",
    "MeasuredRun",
    "PlannedLayout",
    "Question",
    "StepParts",
    "WhatIf",
    "answer_of",
    "best_plan",
    "explain",
    "limit",
    "memory_sentence",
    "parse_fixed",
    "plan",
    "priced",
    "question_of",
    "quick_answer",
    "read_measured",
    "read_run",
    "refined_as_a_whole",
    "remedies",
    "what_ifs",
]
