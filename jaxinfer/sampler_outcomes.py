"""What the sampler says of a row: for the device (`sampler.py`) and the host (`engine.py`)."""

IDLE = 0  # the row yields nothing
RUNNING = 1
STOPPED = 2  # by a stop id
AT_LIMIT = 3  # by length
NOT_FINITE = 4  # a NaN, or no finite maximum: the request fails, the others go on
