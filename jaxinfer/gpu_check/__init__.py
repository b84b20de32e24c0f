"""The real programs compiled for a GPU on a machine without one, and what is asserted of them.

Nothing is executed: the compiler's own figures (memory, aliasing, collectives, launches) are read
from the executables it would run. `target.py` describes the hardware, `cases.py` the serving
plan and its programs, `hlo.py` reads a compiled module, `checks.py` asserts, `cli.py` is the
command behind `scripts/gpu_check`.
"""
