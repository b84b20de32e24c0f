"""Kernels for CPUs, written as LLVM IR and called by XLA: products with weights that are not
quantised, and attention over pages. XLA's own products stay far from the memory's speed where rows
are few, and its attention copies pages before it reads them.

`emit` writes IR, `compiler` makes machine code of it, `xla_call` makes that something XLA's
programs call. `matmul`, `decode` and `prefill` are the kernels, `attention` how they are called;
`choose` says where an engine uses them. What they do not take is left to XLA.
"""
