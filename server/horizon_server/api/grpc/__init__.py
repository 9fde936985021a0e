"""gRPC: a table of calls, and what converts, surrounds and serves them. The only server package that knows
horizon_proto."""
