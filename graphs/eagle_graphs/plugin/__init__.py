"""Fused tree attention for GPUs, in Triton: the op `eagle::TreeAttention` in one kernel, and the commit of a path.

    masks            packs a tree's mask into words
    launch           tiles, splits and grids
    kernels          the kernels (needs triton)
    calls            the kernels on torch tensors (needs triton and torch)
    compile          PTX and cubin without a GPU (needs triton)
    tensorrt_plugin  the kernels inside an engine of TensorRT (needs triton and tensorrt)

What is exact: sums over keys are taken in the buffer's order, in tiles and splits that depend neither on the number of
rows nor on their masks, and a key of the tree that a row does not see adds an exact zero to it, be it infinite or NaN.
So in one compiled kernel a row's bits depend on nothing but what it sees and where that lies in the buffer. They do
depend on where: the same path behind other siblings, or committed, may differ in the last bits, since tensor cores
add in groups. So may tiles of another height, another GPU, or the native attention.
"""
