"""The horizon daemon: RAM-centric fine-tuning for a shared GPU box."""
