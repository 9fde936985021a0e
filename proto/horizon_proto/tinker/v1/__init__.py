"""Generated from the .proto file beside this module by tools/generate_protos.py."""
