"""Whether a model's answers are still those of another one: distributions, and cases."""
