"""Content-addressed files: resumable uploads, verified, fsynced, renamed."""
