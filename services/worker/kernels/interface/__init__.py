"""The interface between the native runner and the kernels: the operations of a step, over torch tensors.

Model, sampler and drafters are written once, against the classes of this package; `kernels.Kernels` groups them. Their
own code defines every operation: plain torch and NumPy, readable, slow, run eagerly. `--kernels reference` serves with
it. Two packages have another implementation:

- `kernels.cpu`: kernels that numba compiles for the processor, recorded and replayed,
- `kernels.cuda`: Triton's and torch's kernels, recorded as CUDA graphs.

Only `kernels.selection` chooses between them. Support for another kind of device is one more package that implements
the four groups of operations: `network`, `rows`, `sampling` and `drafting`.

Products are torch's own here, so a row's bits may depend on the rows beside it: the same tokens up to sums that are
made in another order, not to the bit.

Columns of a step's plan are NumPy arrays on the host. Operands and results of the model are tensors on the device. The
number of rows of an operation is the first dimension of the operand that its docstring names first.

**Recording.** The steps of an epoch run the same operations on the same memory; only the numbers of rows differ. A
sequence of operations is therefore recorded once (`network.NetworkKernels.record`) and then run as a whole: the
compiled implementation replays the recorded kernels in one call, an implementation for CUDA can capture a graph, the
reference calls the function again. Recorded operations read and write `buffers.Buffers`, whose addresses do not change.
"""
