"""Weights in few bits: the kinds there are, how weights become so, and what that buys."""
