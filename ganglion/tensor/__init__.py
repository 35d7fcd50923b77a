"""Three-dimensional tensor parallelism: layers split over x, y and z, after AxoNN-4D."""

from ganglion.tensor.activations import cut, gather
from ganglion.tensor.apply import TensorParallel, apply_tensor_parallel
from ganglion.tensor.cross_entropy import split_cross_entropy
from ganglion.tensor.grid import WITHOUT_OVERLAP, Grid, TensorSettings
from ganglion.tensor.report import TensorReport
from ganglion.tensor.weights import Weights

__all__ = [
    "WITHOUT_OVERLAP",
    "Grid",
    "TensorParallel",
    "TensorReport",
    "TensorSettings",
    "Weights",
    "apply_tensor_parallel",
    "cut",
    "gather",
    "split_cross_entropy",
]
