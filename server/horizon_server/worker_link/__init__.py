"""The link between the daemon and a worker: it survives the daemon, and every report of the worker arrives exactly
once."""
