"""Three-dimensional tensor parallelism: layers split over x, y and z, after AxoNN-4D.

Takes ordinary modules and a cut for each. It knows no model: the cuts of models are made elsewhere.
"""

from ganglion.execute.tensor.activations import cut, gather
from ganglion.execute.tensor.apply import TensorParallel, TensorReport, apply_tensor_parallel
from ganglion.execute.tensor.cross_entropy import split_cross_entropy
from ganglion.execute.tensor.grid import WITHOUT_OVERLAP, Grid, TensorSettings
from ganglion.execute.tensor.weights import Weights

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
