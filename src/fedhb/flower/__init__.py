"""The algorithms on Flower.

`fedhb.flower.server_app:app` is the ServerApp, `fedhb.flower.client_app:app` the ClientApp. A
client is a SuperNode; its id is the `partition-id` of its node config. The server asks which nodes
are there and what they hold (`census`), then runs the engine's own round loop with an executor that
sends messages (`node_cohort`). An answer passes the gate (`fedhb.answers.admission`), is added to
the sums and is forgotten.
"""
