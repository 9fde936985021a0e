"""Version 1 of the wire contract: generated from the .proto files beside this module by tools/generate_protos.py."""
