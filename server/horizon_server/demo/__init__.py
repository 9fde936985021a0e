"""`horizond demo`: a whole fine-tuning job on one machine, from nothing."""
