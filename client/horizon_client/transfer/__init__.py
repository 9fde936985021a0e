"""Files on their way: what is reported meanwhile, local files and their hashes, uploads and downloads."""
