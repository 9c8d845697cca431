"""What tests that run plain Triton kernels in Triton's interpreter (TRITON_INTERPRET=1) share."""

from __future__ import annotations

import numpy as np


class Tensor:
    """A NumPy array that answers the interpreter's questions to a torch tensor."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape = np.ascontiguousarray(array), array.shape
        self.dtype = f"torch.{array.dtype.name}"

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Tensor(self.array)

    def set_(self, storage, *_):
        self.array = storage.array

    def copy_(self, *_):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.shape

    def stride(self):
        return self.array.strides
