"""The records that the server passes around, one definition each: jobs, datasets, models, contents."""
