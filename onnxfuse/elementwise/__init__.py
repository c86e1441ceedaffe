"""Element-wise expressions: their text form, the CUDA source made of one, what its kernels take of a GPU, and where to cut one."""
