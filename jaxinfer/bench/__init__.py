"""`jaxinfer bench`: workloads, arrivals, statistics and the drivers that measure with them."""
