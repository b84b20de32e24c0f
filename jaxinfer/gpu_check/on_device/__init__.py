"""What `scripts/gpu_check --device` runs on the GPU at hand, unattended and within minutes.

Of each kernel: results against its reference, times against the floor on paper and against what
XLA, cuDNN and PyTorch take, and the block sizes that are fastest, as a table for `pallas_kernels`.
Then the whole decode step of a random model of 8B parameters. `--dry-run` takes the same paths
without a GPU: tiny sizes, interpreted on the CPU, and the full sizes compiled.

    registry.py   `DeviceCase`, one kernel with one model's shapes, and the list of all
    attention.py  the cases of attention
    products.py   those of products with quantised weights and of experts
    others.py     those of the sampler's threshold and of writing pages
    xla.py        what XLA computes of a step, held against the same floors
    baselines.py  others' attention for the same inputs
    timing.py     how a kernel is timed
    tasks.py      what is done with a case: check, time, search
    step_task.py  the whole step
    worker.py     a process that does tasks and prints what it found
    session.py    the command: order, budget, workers, files
    summary.py    the table at the end

To add a kernel, write a `DeviceCase` for each of its shapes and let `registry.device_cases` yield
them. A case says, by plain functions:

    sizes      for "tiny" (dry runs), "check" (results) and "time": a dict of what `make` scales by
    make       (sizes, key) -> dict of random input arrays; traced, so use jnp and `random_arrays`,
               and put NaN where nobody may read
    run        (inputs, interpret, tiling) -> the kernel's result; `tiling` None: its own choice
    reference  inputs -> the same result by plain jnp, in float32
    compared   what of a result is held against the reference's, where not all of it is
    tolerance  of the largest difference between the two, relative to the reference's largest entry
    work       sizes -> `roofline.kernels.Work`: what it must move and compute
    tuned      the kernel's and shape's names in the table of block sizes, as the kernel looks them
               up with `pallas_kernels.tuning.choose`; and the `Tiling`s to try beside its rule
    baselines  name -> `Baseline`: others' ways to the same result, to be timed beside it
    feed       for kernels that update an input in place: (inputs, result) -> the next inputs
    target     the part of the floor's speed that it should reach; None: no such aim

The same case is checked, timed, searched, compiled and tried in dry runs: nothing else is to be
written. `tests/test_gpu_device.py` dry-runs some of them.
"""
