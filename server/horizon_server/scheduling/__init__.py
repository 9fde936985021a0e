"""Who is served next: pure arithmetic over jobs, shares and quotas. No clock, no database, no process: callers give the
time."""
