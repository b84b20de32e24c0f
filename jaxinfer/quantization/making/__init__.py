"""`jaxinfer quantize`: a checkpoint's weights in few bits, chosen by what they do to calibration
text."""
