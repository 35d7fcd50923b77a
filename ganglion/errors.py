"""All errors that a user can see, in one tree.

    GanglionError
    |-- ConfigError          a run file or an override is wrong; names the user's key
    |   |-- UnknownKeyError  an unknown key; names the nearest known one
    |   |-- LayoutError      numbers that do not fit together: axes, batch, heads, blocks
    |   `-- NotBuiltError    a valid request that this version cannot carry out
    |-- DataError            a corpus, tokenizer or data set that cannot be used
    |-- CheckpointError      missing, incomplete, corrupt or mismatching saved state
    |-- LaunchError          processes could not be started or could not meet
    |-- OffloadError         a memory tier that is full, slow past its deadline or failing
    |-- PipelineError        an action of a stage failed; names rank, stage and microbatch
    `-- CommError            ranks failed to exchange data
        |-- PeerLost         another rank is gone or silent past its deadline
        `-- ProtocolError    ranks disagree about what is being exchanged

A message says what was wrong, with the numbers and the user's own key, and ends with one remedy.
"""

from __future__ import annotations


class GanglionError(Exception):
    """Base of all errors raised on purpose; `str(error)` can be shown to a user."""


class ConfigError(GanglionError):
    """A run file, an override or a plan holds a value that cannot be used."""


class UnknownKeyError(ConfigError):
    """A key that no section of the run file has."""


class LayoutError(ConfigError):
    """Sizes that do not fit together: axes and processes, batch and microbatches, heads, blocks."""


class NotBuiltError(ConfigError):
    """A valid request that this version of Ganglion cannot carry out."""


class DataError(GanglionError):
    """Training data that is missing, empty or unreadable."""


class CheckpointError(GanglionError):
    """Saved state that is missing, incomplete, corrupt or made for another model."""


class LaunchError(GanglionError):
    """Processes that could not be started, or could not find each other."""


class OffloadError(GanglionError):
    """A tier that could not take or give back optimizer state."""


class PipelineError(GanglionError):
    """A computation of a stage that failed, here or on another rank."""


class CommError(GanglionError):
    """Ranks that failed to exchange data."""


class PeerLost(CommError):
    """Another rank died or stayed silent past the deadline."""


class ProtocolError(CommError):
    """Ranks that disagree about what is being exchanged."""
