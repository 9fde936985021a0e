"""The daemon's two interfaces, gRPC and HTTP, and the one table that maps errors to both."""
