"""How C clients take their steps: batches, stochastic gradient descent, the prior's pull, averages of iterates."""
