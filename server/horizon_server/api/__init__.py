"""The daemon's two faces, gRPC and HTTP, and the one table that maps errors to both."""
