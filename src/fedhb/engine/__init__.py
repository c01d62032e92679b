"""The engine that runs an algorithm on this machine: the round loop, and who trains the clients."""
