"""The host parameter store: layout, planes, checkpoints, the AdamW kernel. Knows tensors only."""
