"""The engine that runs an algorithm on this machine: the round loop, executors, the client store and checkpoints."""
