"""Local training: batches, stochastic gradient descent, the prior's pull, averages of iterates."""
