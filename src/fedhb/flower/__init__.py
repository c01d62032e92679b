"""The same algorithms on Flower: `fedhb.flower.server_app:app` is the ServerApp, `fedhb.flower.client_app:app` the ClientApp.

A client is a SuperNode, and its id is the `partition-id` of its node config. The server asks who is there and what they hold
(`census`), then runs the engine's own round loop with an executor that sends messages (`executor`). What it receives passes the
gate (`fedhb.updates`), is folded into sums and forgotten.
"""
