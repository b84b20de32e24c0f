"""What a step must move and compute, and how fast a device could do it: floors, on paper.

The floor of a kernel is the longest of three times: its bytes at the memory's rate, its operations
at the rate of the units that do them, and its bytes over the links between devices (Williams,
Waterman & Patterson 2009). Kernels run one after another, so a step's floor is the sum of theirs.
A kernel reads what it is given from memory and writes what it makes to memory, each once; a cache
that keeps activations between kernels can beat that part by a little. Launches cost nothing here.

`devices.py` has the rates, `storage.py` the ways of storing weights, `kernels.py` the work of each
kind of kernel from shapes, `step.py` that of a whole step, `memory.py` the engine's memory plan for
a device that is not there, `report.py` the tables of `jaxinfer plan`.
"""
