"""What is said of a row: by the sampler to the host (`engine.py`), and by the host to `forbid`."""

IDLE = 0  # the row yields nothing
RUNNING = 1
STOPPED = 2  # by a stop id
AT_LIMIT = 3  # by length
NOT_FINITE = 4  # a NaN, or no finite maximum: the request fails, the others go on

FREE = 0  # the row may take any token
RULED = 1  # it takes one that its slot's mask allows
HELD = 2  # its mask is not known yet: it sits this step out, and computes it again
