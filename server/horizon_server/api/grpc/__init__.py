"""gRPC servicers: wire in, domain calls, wire out. The only server package that knows horizon_proto."""
